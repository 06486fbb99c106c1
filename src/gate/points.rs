//! Cases by name: loaded, validated, predicted and held to their goldens.

use std::path::{Path, PathBuf};

use crate::case::{Case, CaseFile, ModelDims, OpCase, StepCase, Tree};
use crate::compose::Fault;
use crate::model::{ModelConfig, Scenario};
use crate::perfdb::Refusal;
use crate::replay::{OpPrediction, Outcome, Prediction, Replayer, StepLog, StepPrediction};
use crate::timing::{InputError, Policy, read_text};

use super::band::{Bands, Comparison, compare};
use super::golden;

/// A project folder: `cases/`, `goldens/` and `data/`.
#[derive(Debug)]
pub struct Points {
    root: PathBuf,
    tree: Tree,
    replayer: Replayer,
    mutation: Mutation,
}

/// What a test of the gate does to every prediction of a serving case, to see it caught.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct Mutation {
    pub fault: Option<Fault>,
    /// To what the replay is told.
    pub scenario: fn(&mut Scenario),
    /// To what comes out.
    pub prediction: fn(&Case, &mut Prediction),
}

impl Mutation {
    pub const NONE: Self = Self {
        fault: None,
        scenario: |_| {},
        prediction: |_, _| {},
    };
}

/// A predictor of times: from a factor and a recorded schedule.
pub(super) type Times<'a> = dyn Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError> + 'a;

/// A predicted case.
#[derive(Debug)]
pub enum Predicted {
    Serving {
        case: Box<Case>,
        strict: Box<Outcome>,
        estimate: Box<Outcome>,
    },
    Op {
        case: Box<OpCase>,
        prediction: Box<Result<OpPrediction, Refusal>>,
    },
    Step {
        case: Box<StepCase>,
        strict: Box<Result<StepPrediction, Refusal>>,
        estimate: Box<Result<StepPrediction, Refusal>>,
    },
}

/// A fresh prediction beside its golden.
#[derive(Debug)]
pub struct Verdict {
    /// Text of the fresh prediction.
    pub fresh: String,
    pub golden: Option<String>,
    /// `None` without a golden.
    pub comparison: Option<Comparison>,
}

impl Points {
    /// Opens a project folder; op tables come from `systems_dir` where one is given.
    pub fn open(root: &Path, systems_dir: Option<&Path>) -> Result<Self, InputError> {
        Ok(Self {
            root: root.to_path_buf(),
            tree: Tree::open(root.join("cases"))?,
            replayer: Replayer::open(&root.join("data"), systems_dir)?,
            mutation: Mutation::NONE,
        })
    }

    /// Predicts wrongly from here on.
    #[doc(hidden)]
    pub fn mutate(&mut self, mutation: Mutation) {
        if let Some(fault) = mutation.fault {
            self.replayer.plant(fault);
        }
        self.mutation = mutation;
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn replayer(&self) -> &Replayer {
        &self.replayer
    }

    /// Names of all cases, sorted; reads none of them.
    pub fn names(&self) -> Result<Vec<String>, InputError> {
        self.tree.names()
    }

    /// Reads and validates one case by its exact name.
    pub fn case(&self, name: &str) -> Result<CaseFile, InputError> {
        self.load(&self.tree.path_of(name)?)
    }

    /// Reads and validates a case file anywhere.
    pub fn load(&self, file: &Path) -> Result<CaseFile, InputError> {
        self.check(CaseFile::load(file)?)
    }

    /// Validates a case against its model.
    pub fn check(&self, case: CaseFile) -> Result<CaseFile, InputError> {
        let config = ModelConfig::load(self.replayer.models(), &case.deployment().model)?;
        case.validate(&ModelDims {
            heads: config.heads,
            kv_heads: config.kv_heads,
            experts: config.experts.map(|experts| experts.count),
        })?;
        Ok(case)
    }

    /// Predicts a case under both policies.
    pub fn predict(&self, case: CaseFile) -> Result<Predicted, InputError> {
        Ok(match case {
            CaseFile::Serving(case) => {
                let predict = |policy| self.outcome(&case, policy);
                Predicted::Serving {
                    strict: Box::new(predict(Policy::Strict)?),
                    estimate: Box::new(predict(Policy::Estimate)?),
                    case: Box::new(case),
                }
            }
            CaseFile::Op(case) => Predicted::Op {
                prediction: Box::new(self.replayer.op(&case.scenario())?),
                case: Box::new(case),
            },
            CaseFile::Step(case) => {
                let scenario = case.scenario();
                Predicted::Step {
                    strict: Box::new(self.replayer.step(&scenario, Policy::Strict)?),
                    estimate: Box::new(self.replayer.step(&scenario, Policy::Estimate)?),
                    case: Box::new(case),
                }
            }
        })
    }

    /// Predicts a serving case under one policy.
    pub(super) fn outcome(&self, case: &Case, policy: Policy) -> Result<Outcome, InputError> {
        let outcome = self.replayer.predict(&self.scenario(case), policy)?;
        Ok(self.mutated(case, outcome))
    }

    /// Hands the times of a serving case's requests under one policy to `prove`: with every row
    /// times a factor, on a recorded schedule where one is given.
    pub(super) fn with_times<T>(
        &self,
        case: &Case,
        policy: Policy,
        prove: impl FnOnce(&Times<'_>) -> T,
    ) -> T {
        let scenario = self.scenario(case);
        match self.replayer.times(&scenario, policy) {
            Ok(times) => prove(&|factor, recorded| {
                let outcome = times(factor, recorded);
                Ok(self.mutated(case, outcome))
            }),
            Err(error) => prove(&|_, _| Err(error.clone())),
        }
    }

    fn scenario(&self, case: &Case) -> Scenario {
        let mut scenario = case.scenario();
        (self.mutation.scenario)(&mut scenario);
        scenario
    }

    fn mutated(&self, case: &Case, mut outcome: Outcome) -> Outcome {
        if let Outcome::Predicted(prediction) = &mut outcome {
            (self.mutation.prediction)(case, prediction);
        }
        outcome
    }

    /// Where a case's golden lies: the same path under `goldens/`, with the ending `.snap`.
    pub fn golden_path(&self, name: &str) -> PathBuf {
        self.root.join("goldens").join(format!("{name}.snap"))
    }

    /// The text of a case's golden, without insta's header; `None` if there is none.
    pub fn golden(&self, name: &str) -> Result<Option<String>, InputError> {
        let file = self.golden_path(name);
        if matches!(std::fs::symlink_metadata(&file), Err(error)
            if error.kind() == std::io::ErrorKind::NotFound)
        {
            return Ok(None);
        }
        let text = read_text(&file, "the golden")?;
        golden::body(&text, &file).map(Some)
    }

    /// Predicts a case and compares it with its golden.
    pub fn verdict(&self, name: &str) -> Result<Verdict, InputError> {
        let case = self.case(name)?;
        let bands = bands_of(&case);
        let fresh = golden::render(&self.predict(case)?);
        let golden = self.golden(name)?;
        Ok(Verdict {
            comparison: golden
                .as_ref()
                .map(|golden| compare(golden, &fresh, &bands)),
            fresh,
            golden,
        })
    }
}

/// The bands of a case, widened where a serving case says so.
pub fn bands_of(case: &CaseFile) -> Bands {
    match case {
        CaseFile::Serving(case) => Bands::of_case(case.tolerance.as_ref()),
        CaseFile::Op(_) | CaseFile::Step(_) => Bands::default(),
    }
}
