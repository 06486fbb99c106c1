//! The five proofs over every serving case, and that each catches its planted fault.

mod spoil;

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use stepgate::case::{Case, CaseFile};
use stepgate::compose::{Part, Receipt, ReceiptLine};
use stepgate::gate::{
    AuditFault, AuditReport, Check, FiledRows, Points, Predicted, Proof, as_filed, audit,
    blindness, check_weights, homogeneity, measured_cells, no_leak, null, render, sees_no_answer,
    sums, tables_as_imported,
};
use stepgate::model::{ModelConfig, Op, OpIndex, QkNorm, RankLoad};
use stepgate::perfdb::OpKey;
use stepgate::replay::{IterationRecord, Outcome, Prediction, RankRecord, StepKind, StepLog};
use stepgate::timing::{Execution, HostClass, InputError, Origin, Policy, RowId};

use spoil::{scale_receipt, tpot_of, ttft_of, with_addend, with_factor, with_factor_throughout};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// The point that was run again on the host its rows come from.
const CASE: &str = "gpt-oss-120b/b200-trtllm/tp2/1024-1024-c4";

fn points() -> &'static Points {
    static POINTS: OnceLock<Points> = OnceLock::new();
    POINTS.get_or_init(|| Points::open(Path::new(ROOT), None).expect("the project opens"))
}

fn serving_case(name: &str) -> Case {
    match points().case(name).expect("the case loads") {
        CaseFile::Serving(case) => case,
        other => panic!("{} is no serving case", other.file().display()),
    }
}

fn cases() -> Vec<(String, CaseFile)> {
    let names = points().names().expect("the cases list");
    let load = |name: String| {
        let case = points().case(&name).expect("the case loads");
        (name, case)
    };
    names.into_iter().map(load).collect()
}

fn serving_cases() -> Vec<(String, Case)> {
    let serving = |(name, case)| match case {
        CaseFile::Serving(case) => Some((name, case)),
        _ => None,
    };
    cases().into_iter().filter_map(serving).collect()
}

fn predict(case: &Case, policy: Policy) -> Prediction {
    let outcome = points().replayer().predict(&case.scenario(), policy);
    match outcome.expect("the data is sound") {
        Outcome::Predicted(prediction) => *prediction,
        Outcome::Refused(refusal) => panic!("{}: {refusal}", case.file.display()),
    }
}

/// A predictor whose rows are scaled.
fn scaled(
    case: &Case,
    policy: Policy,
) -> impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError> {
    let scenario = case.scenario();
    move |factor, recorded| {
        points()
            .replayer()
            .predict_scaled(&scenario, policy, factor, |_| true, recorded)
    }
}

/// The config of every model, by model id.
fn configs() -> &'static BTreeMap<String, ModelConfig> {
    static CONFIGS: OnceLock<BTreeMap<String, ModelConfig>> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        let models = points().replayer().models();
        let mut configs = BTreeMap::new();
        for entry in fs::read_dir(models).expect("the models list") {
            let path = entry.expect("the models list").path();
            if path.extension().is_some_and(|ending| ending == "json") {
                let id = path.file_stem().expect("a file has a name");
                let id = id.to_string_lossy().into_owned();
                let config = ModelConfig::load(models, &id).expect("the config loads");
                configs.insert(id, config);
            }
        }
        configs
    })
}

fn audited(case: &Case, prediction: &Prediction) -> Result<AuditReport, Vec<AuditFault>> {
    let scenario = case.scenario();
    audit(&scenario, configs(), prediction)
}

/// Runs `prove` on every serving case and policy, on all cores; lists what fails.
fn over_every_case(prove: impl Fn(&str, &Case, Policy) -> Result<(), String> + Sync) {
    let work: Vec<(String, Case, Policy)> = serving_cases()
        .into_iter()
        .flat_map(|(name, case)| Policy::ALL.map(|policy| (name.clone(), case.clone(), policy)))
        .collect();
    assert!(work.len() >= 526, "only {} predictions", work.len());
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some((name, case, policy)) =
                    work.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    if let Err(what) = prove(name, case, *policy) {
                        let line = format!("{name} ({}): {what}", policy.name());
                        failures.lock().expect("no thread panics").push(line);
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().expect("no thread panics");
    failures.sort();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

fn listed(faults: &[AuditFault]) -> String {
    let lines = faults.iter().take(5).map(AuditFault::to_string);
    lines.collect::<Vec<_>>().join("\n    ")
}

fn checks(faults: &[AuditFault]) -> Vec<Check> {
    let mut checks: Vec<Check> = faults.iter().map(|fault| fault.check).collect();
    checks.sort_unstable();
    checks.dedup();
    checks
}

// ---- the proofs

#[test]
fn without_rows_there_is_no_time() {
    over_every_case(|name, case, policy| {
        null(name, scaled(case, policy)).map_err(|failure| failure.to_string())
    });
}

#[test]
fn times_scale_with_their_rows() {
    over_every_case(|name, case, policy| {
        homogeneity(name, scaled(case, policy)).map_err(|failure| failure.to_string())
    });
}

/// Requests, receipt and parts come to the mean, and the audit comes to the receipt.
#[test]
fn the_audit_arrives_at_every_receipt() {
    over_every_case(|name, case, policy| {
        let prediction = predict(case, policy);
        sums(name, &prediction).map_err(|failure| failure.to_string())?;
        match audited(case, &prediction) {
            Ok(report) if report.tied_lines == 0 => Ok(()),
            Ok(report) => Err(format!("{} lines differ by a tie", report.tied_lines)),
            Err(faults) => Err(listed(&faults)),
        }
    });
}

/// The golden's text of a case, with the exact figures and decisions behind it.
fn everything(case: &Case) -> String {
    let predicted = points()
        .predict(CaseFile::Serving(case.clone()))
        .expect("the data is sound");
    let mut text = render(&predicted);
    if let Predicted::Serving {
        strict, estimate, ..
    } = predicted
    {
        for outcome in [strict, estimate] {
            if let Outcome::Predicted(p) = *outcome {
                text += &format!(
                    "\n{:?}\n{:?}\n{:?}\n{:?}\n",
                    p.ttft, p.tpot, p.ttft_receipt, p.tpot_receipt
                );
                for request in &p.log.requests {
                    text += &format!("{request:?}\n");
                }
            }
        }
    }
    text
}

#[test]
fn predictions_do_not_see_their_answers() {
    over_every_case(|name, case, policy| match policy {
        // Both policies are in one text.
        Policy::Estimate => Ok(()),
        Policy::Strict => blindness(name, case, everything).map_err(|failure| failure.to_string()),
    });
    for (name, case) in cases() {
        let blind = match case {
            CaseFile::Serving(case) => sees_no_answer(&name, &case.scenario()),
            CaseFile::Op(case) => sees_no_answer(&name, &case.scenario()),
            CaseFile::Step(case) => sees_no_answer(&name, &case.scenario()),
        };
        assert_eq!(blind, Ok(()));
    }
}

#[test]
fn host_rows_are_the_cells_they_name() {
    let data = Path::new(ROOT).join("data");
    let rows = no_leak(&data).unwrap_or_else(|failures| panic!("{failures:#?}"));
    assert!(rows >= 6, "only {rows} host rows");
}

#[test]
fn measured_ops_and_steps_are_the_cells_they_name() {
    let data = Path::new(ROOT).join("data");
    let cases: Vec<CaseFile> = cases().into_iter().map(|(_, case)| case).collect();
    let values = measured_cells(&data, &cases).unwrap_or_else(|failures| panic!("{failures:#?}"));
    assert!(values >= 14, "only {values} measured values");
}

// ---- planted faults: what each proof catches, and what it is not there for

/// A predictor that spoils what another one predicts.
fn spoiled(
    predict: impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError>,
    spoil: impl Fn(Prediction) -> Prediction,
) -> impl Fn(f64, Option<&StepLog>) -> Result<Outcome, InputError> {
    move |factor, recorded| {
        Ok(match predict(factor, recorded)? {
            Outcome::Predicted(prediction) => Outcome::Predicted(Box::new(spoil(*prediction))),
            refused @ Outcome::Refused(_) => refused,
        })
    }
}

#[test]
fn rows_of_steps_with_prompts_do_not_stand_for_decode_steps() {
    let case = serving_case(CASE);
    let mut scenario = case.scenario();
    scenario.serving.cuda_graph = None;
    for policy in Policy::ALL {
        let outcome = points().replayer().predict(&scenario, policy);
        let Ok(Outcome::Predicted(prediction)) = outcome else {
            panic!("the case without graphs is predicted");
        };
        assert!(prediction.steps["decode eager"] > 0);
        let missing = &prediction.coverage.missing;
        let derived = prediction
            .coverage
            .derived
            .get("host_dispatch (eager decode)");
        match policy {
            Policy::Strict => {
                assert!(missing.contains("host_dispatch (eager decode)"));
                assert_eq!(prediction.coverage.host, HostClass::Missing);
                // The GPU alone: about the time of the graph's replay.
                assert!(prediction.tpot.mean_ms < 4.0);
            }
            Policy::Estimate => {
                let rule = derived.expect("derived from steps with prompts");
                assert!(
                    rule.ends_with("of steps with prompts, by launch counts"),
                    "{rule}"
                );
                assert_eq!(prediction.coverage.host, HostClass::Derived);
            }
        }
        let report = audit(&scenario, configs(), &prediction);
        report.unwrap_or_else(|faults| panic!("{}: {faults:?}", policy.name()));
    }
}

#[test]
fn an_addend_is_caught_by_null_homogeneity_sums_and_audit() {
    let case = serving_case(CASE);
    let policy = Policy::Estimate;
    let planted = || {
        spoiled(scaled(&case, policy), |prediction| {
            with_addend(prediction, 5.0)
        })
    };
    let failure = null(CASE, planted()).expect_err("null sees it");
    assert_eq!(failure.proof, Proof::Null);
    assert_eq!(failure.what, "mean TTFT is 5 ms");
    let failure = homogeneity(CASE, planted()).expect_err("homogeneity sees it");
    assert_eq!(failure.proof, Proof::Homogeneity);
    assert!(
        failure.what.starts_with("rows times 2: mean TTFT"),
        "{failure}"
    );
    let faulty = with_addend(predict(&case, policy), 5.0);
    let failure = sums(CASE, &faulty).expect_err("sums see it");
    assert!(failure.what.contains("its receipt"), "{failure}");
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    assert_eq!(checks(&faults), [Check::Times], "{}", listed(&faults));
}

#[test]
fn an_addend_in_one_request_is_caught_by_null() {
    let case = serving_case(CASE);
    let planted = spoiled(scaled(&case, Policy::Strict), |mut prediction| {
        prediction.log.requests[17].first_token_ms += 1e-9;
        prediction
    });
    let failure = null(CASE, planted).expect_err("null sees it");
    assert!(failure.what.starts_with("request 17 takes"), "{failure}");
}

#[test]
fn a_factor_in_the_total_is_caught_by_sums_and_audit() {
    let case = serving_case(CASE);
    let policy = Policy::Estimate;
    let planted = || {
        spoiled(scaled(&case, policy), |prediction| {
            with_factor(prediction, 1.03)
        })
    };
    // Zero times 1.03 is zero, and a factor scales with the rows.
    assert_eq!(null(CASE, planted()), Ok(()));
    let faulty = with_factor(predict(&case, policy), 1.03);
    let failure = sums(CASE, &faulty).expect_err("sums see it");
    assert_eq!(failure.proof, Proof::Sums);
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    assert_eq!(checks(&faults)[0], Check::Times, "{}", listed(&faults));
}

#[test]
fn a_mean_that_is_not_its_requests_is_caught_by_sums_and_audit() {
    let case = serving_case(CASE);
    let mut faulty = predict(&case, Policy::Strict);
    faulty.ttft.mean_ms *= 1.03;
    let failure = sums(CASE, &faulty).expect_err("sums see it");
    assert!(failure.what.contains("its requests"), "{failure}");
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    assert_eq!(checks(&faults), [Check::Totals], "{}", listed(&faults));
}

#[test]
fn a_factor_in_every_part_alike_is_caught_by_the_audit_alone() {
    let case = serving_case(CASE);
    let policy = Policy::Estimate;
    let plant = |prediction| with_factor_throughout(prediction, 1.03);
    assert_eq!(null(CASE, spoiled(scaled(&case, policy), plant)), Ok(()));
    let faulty = plant(predict(&case, policy));
    assert_eq!(sums(CASE, &faulty), Ok(()));
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    assert!(
        checks(&faults).contains(&Check::Times),
        "{}",
        listed(&faults)
    );
    // With the times put right, the coefficients alone give it away, part by part.
    let mut faulty = predict(&case, policy);
    scale_receipt(&mut faulty.ttft_receipt, 1.03);
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    assert!(
        checks(&faults).contains(&Check::Receipt),
        "{}",
        listed(&faults)
    );
}

#[test]
fn a_factor_in_every_row_is_caught_by_the_audit() {
    let case = serving_case(CASE);
    let scenario = case.scenario();
    let replayer = points().replayer();
    for (pick, check) in [
        (
            (|origin: &Origin| matches!(origin, Origin::Op { .. })) as fn(&Origin) -> bool,
            Check::Rows,
        ),
        (|origin| matches!(origin, Origin::Host(_)), Check::Rows),
    ] {
        let outcome = replayer.predict_scaled(&scenario, Policy::Estimate, 1.03, pick, None);
        let Ok(Outcome::Predicted(faulty)) = outcome else {
            panic!("{CASE} is not predicted");
        };
        assert_eq!(sums(CASE, &faulty), Ok(()));
        let faults = audited(&case, &faulty).expect_err("the audit sees it");
        assert_eq!(checks(&faults), [check], "{}", listed(&faults));
    }
}

#[test]
fn a_lookup_whose_weights_do_not_sum_to_one_is_caught_by_the_audit() {
    let case = serving_case(CASE);
    let mut faulty = predict(&case, Policy::Strict);
    // As if the experts' rows were blended with weights that sum to 1.03.
    let rows = &faulty.rows;
    let mut moved_ms = 0.0;
    for line in &mut faulty.ttft_receipt.lines {
        if line.part == Part::Kernel && rows.describe(line.row).contains("/moe/") {
            let more = 0.03 * line.coefficient;
            line.coefficient += more;
            moved_ms += more * rows.ms(line.row);
        }
    }
    assert!(moved_ms > 0.005, "{moved_ms} ms");
    faulty.ttft_receipt.parts_ms[Part::Kernel as usize] += moved_ms;
    for request in &mut faulty.log.requests {
        request.first_token_ms += moved_ms;
        request.last_token_ms += moved_ms;
    }
    faulty.ttft = ttft_of(&faulty);
    // Everything still adds up.
    assert_eq!(sums(CASE, &faulty), Ok(()));
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    assert!(
        checks(&faults).contains(&Check::Times),
        "{}",
        listed(&faults)
    );
    // And with the true times, the line itself is named.
    let mut faulty = predict(&case, Policy::Strict);
    for line in &mut faulty.ttft_receipt.lines {
        if faulty.rows.describe(line.row).contains("/moe/") {
            line.coefficient *= 1.03;
        }
    }
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    let named = |fault: &AuditFault| fault.check == Check::Receipt && fault.what.contains("/moe/");
    assert!(faults.iter().any(named), "{}", listed(&faults));
    assert!(check_weights([0.4, 0.63]).is_err());
    assert!(check_weights([1.4, -0.4]).is_err());
    assert!(check_weights([0.4, 0.6]).is_ok());
}

#[test]
fn time_moved_between_parts_is_caught_by_the_audit() {
    let case = serving_case(CASE);
    let mut faulty = predict(&case, Policy::Estimate);
    let receipt = &mut faulty.ttft_receipt;
    let line = receipt
        .lines
        .iter_mut()
        .find(|line| line.part == Part::HostDispatch)
        .expect("dispatch lies on the path");
    let ms = line.coefficient * faulty.rows.ms(line.row);
    line.part = Part::HostPrepare;
    receipt.parts_ms[Part::HostDispatch as usize] -= ms;
    receipt.parts_ms[Part::HostPrepare as usize] += ms;
    assert_eq!(sums(CASE, &faulty), Ok(()));
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    assert_eq!(checks(&faults), [Check::Receipt], "{}", listed(&faults));
}

#[test]
fn a_false_decision_is_caught_by_the_audit() {
    let case = serving_case(CASE);
    let mut faulty = predict(&case, Policy::Strict);
    let steps = faulty.log.iterations.iter_mut();
    let (_, ranks) = steps
        .filter_map(|iteration| iteration.step.as_mut())
        .nth(100)
        .expect("there are a hundred steps");
    ranks[0].kv_sum += 1;
    let faults = audited(&case, &faulty).expect_err("the audit sees it");
    assert_eq!(checks(&faults)[0], Check::Decisions, "{}", listed(&faults));
}

// ---- planted faults of each family: what only the audit can see

/// One case per family: grouped-query attention with windows, latent attention with dense layers and
/// a shared expert, a norm across ranks, gated deltanet under either runtime.
const FAMILIES: [&str; 5] = [
    CASE,
    "deepseek-r1-0528/b200-trtllm-fp4/tp8/1024-1024-c4",
    "minimax-m2.5/b200-trtllm/tp4/1024-1024-c4",
    "qwen3.5-397b-a17b/b200-trtllm/tp8-ep8/1024-1024-c4",
    "qwen3.5-397b-a17b/h100-sglang/tp8/1024-1024-c1",
];

/// Moves every first token, and every token behind it, so that the means become those of the
/// receipts: nothing but the receipt's counts is wrong.
fn settled(mut faulty: Prediction) -> Prediction {
    let ttft_ms = faulty.ttft_receipt.total_ms() - faulty.ttft.mean_ms;
    let tpot_ms = faulty.tpot_receipt.total_ms() - faulty.tpot.mean_ms;
    for request in &mut faulty.log.requests {
        request.first_token_ms += ttft_ms;
        request.last_token_ms += ttft_ms + tpot_ms * f64::from(request.output - 1);
    }
    faulty.ttft = ttft_of(&faulty);
    faulty.tpot = tpot_of(&faulty);
    faulty
}

/// Adds to a receipt's line, which need not be there.
fn add_to(receipt: &mut Receipt, part: Part, row: RowId, coefficient: f64, row_ms: f64) {
    let line = receipt
        .lines
        .iter_mut()
        .find(|line| (line.part, line.row) == (part, row));
    match line {
        Some(line) => line.coefficient += coefficient,
        None => receipt.lines.push(ReceiptLine {
            part,
            row,
            coefficient,
        }),
    }
    receipt.parts_ms[part as usize] += coefficient * row_ms;
}

/// The prediction with the picked rows counted `factor` times, in TTFT and TPOT.
fn recounted(honest: &Prediction, factor: f64, pick: impl Fn(&Origin) -> bool) -> Prediction {
    let mut faulty = honest.clone();
    for receipt in [&mut faulty.ttft_receipt, &mut faulty.tpot_receipt] {
        for line in &mut receipt.lines {
            if pick(honest.rows.origin(line.row)) {
                let more = (factor - 1.0) * line.coefficient;
                line.coefficient += more;
                receipt.parts_ms[line.part as usize] += more * honest.rows.ms(line.row);
            }
        }
    }
    faulty
}

/// Holds that the audit sees a fault in a receipt: by the times, where these have been made to
/// agree, and by the lines alone, where they have not.
fn assert_audit_sees(what: &str, case: &Case, faulty: Prediction) {
    let faults = audited(case, &faulty).expect_err(what);
    assert!(
        checks(&faults).contains(&Check::Receipt),
        "{what}: {}",
        listed(&faults)
    );
    let settled = settled(faulty);
    assert_eq!(sums(what, &settled), Ok(()), "{what}: all adds up");
    let faults = audited(case, &settled).expect_err(what);
    assert!(
        checks(&faults).contains(&Check::Times),
        "{what}: {}",
        listed(&faults)
    );
}

/// The value of a row in an integer column of its table.
fn column(origin: &Origin, name: &str) -> Option<i64> {
    match origin {
        Origin::Op { table, index, .. } => Some(*table.int(name).ok()?.get(*index as usize)?),
        _ => None,
    }
}

fn word<'a>(origin: &'a Origin, name: &str) -> Option<&'a str> {
    match origin {
        Origin::Op { table, index, .. } => Some(table.text(name).ok()?.get(*index as usize)?),
        _ => None,
    }
}

fn of_table(origin: &Origin, name: &str) -> bool {
    matches!(origin, Origin::Op { table, .. } if table.label.ends_with(name))
}

fn of_gemm(origin: &Origin, n: RangeInclusive<i64>, k: RangeInclusive<i64>) -> bool {
    let within = |name, range: RangeInclusive<i64>| {
        column(origin, name).is_some_and(|value| range.contains(&value))
    };
    of_table(origin, "/gemm_perf") && within("n", n) && within("k", k)
}

/// A kind of op, a case that launches it, and the rows that price it.
type Kind = (&'static str, &'static str, fn(&Origin) -> bool);

const DEEPSEEK: &str = FAMILIES[1];
const MINIMAX: &str = FAMILIES[2];
const QWEN: &str = FAMILIES[3];
const QWEN_SGLANG: &str = FAMILIES[4];

const KINDS: [Kind; 12] = [
    ("latent attention of prompts", DEEPSEEK, |row| {
        of_table(row, "/context_mla_perf")
    }),
    ("latent attention of generation", DEEPSEEK, |row| {
        of_table(row, "/generation_mla_perf")
    }),
    ("folded latent projections", DEEPSEEK, |row| {
        of_table(row, "/mla_bmm_perf")
    }),
    ("latent down projection", DEEPSEEK, |row| {
        // Two lines of the table stand around 1536 + 512 + 64.
        of_gemm(row, 2048..=2560, 7168..=7168)
    }),
    ("dense first layers", DEEPSEEK, |row| {
        // And around 18432 / 8.
        of_gemm(row, 7168..=7168, 2048..=2560)
    }),
    ("shared expert of DeepSeek", DEEPSEEK, |row| {
        of_gemm(row, 512..=512, 7168..=7168)
    }),
    ("gathers of queries, keys and others", MINIMAX, |row| {
        word(row, "op_name") == Some("all_gather")
    }),
    ("convolution of prompts", QWEN, |row| {
        word(row, "kernel_source") == Some("causal_conv1d_fn")
    }),
    ("delta rule of prompts", QWEN_SGLANG, |row| {
        word(row, "kernel_source") == Some("chunk_gated_delta_rule")
    }),
    ("recurrent delta rule", QWEN_SGLANG, |row| {
        word(row, "kernel_source").is_some_and(|name| name.starts_with("fused_recurrent"))
    }),
    ("shared expert of Qwen", QWEN, |row| {
        of_gemm(row, 4096..=4096, 128..=128)
    }),
    ("sums over ranks", QWEN_SGLANG, |row| {
        of_table(row, "/custom_allreduce_perf")
    }),
];

#[test]
fn a_factor_in_any_kind_of_op_is_caught_by_the_audit() {
    for name in FAMILIES {
        let case = serving_case(name);
        let honest = predict(&case, Policy::Strict);
        for (what, _, pick) in KINDS.iter().filter(|(_, of, _)| *of == name) {
            let faulty = recounted(&honest, 1.03, pick);
            let moved_ms = [
                (&faulty.ttft_receipt, &honest.ttft_receipt),
                (&faulty.tpot_receipt, &honest.tpot_receipt),
            ];
            let moved_ms = moved_ms.map(|(after, before)| after.total_ms() - before.total_ms());
            assert!(
                moved_ms.iter().any(|ms| *ms > 1e-6),
                "{what}: {moved_ms:?} ms"
            );
            assert_audit_sees(what, &case, faulty);
        }
    }
}

/// As if one launch of one op were missing from one request's way to its first token.
#[test]
fn an_op_dropped_from_a_receipt_is_caught_by_the_audit() {
    let next = AtomicUsize::new(0);
    let dropped = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(name) = FAMILIES.get(next.fetch_add(1, Ordering::Relaxed)) {
                    dropped.fetch_add(drop_each_op(name), Ordering::Relaxed);
                }
            });
        }
    });
    let dropped = dropped.into_inner();
    assert!(dropped >= 80, "only {dropped} ops");
}

fn drop_each_op(name: &str) -> usize {
    let case = serving_case(name);
    let scenario = case.scenario();
    let honest = predict(&case, Policy::Strict);
    let composer = points().replayer().composer(&scenario, Policy::Strict);
    let Ok(Ok(mut composer)) = composer else {
        panic!("{name} is not composed");
    };
    let load = RankLoad {
        prompts: vec![scenario.workload.isl],
        generation: 1,
        padded: 1,
        kv_sum: u64::from(scenario.workload.isl),
        ..RankLoad::default()
    };
    let weight = 1.0 / honest.log.requests.len() as f64;
    let ops = composer.plan().ops.clone();
    for (index, op) in ops.iter().enumerate() {
        let lookup = composer.price_alone(OpIndex(index as u16), &load);
        let part = if op.key.is_collective() {
            Part::Transfer
        } else {
            Part::Kernel
        };
        let mut faulty = honest.clone();
        for term in composer.pricer().terms(lookup) {
            let row_ms = honest.rows.ms(term.row);
            let less = -weight * term.coefficient();
            add_to(&mut faulty.ttft_receipt, part, term.row, less, row_ms);
        }
        let faults = audited(&case, &faulty).expect_err(&op.name);
        assert!(
            checks(&faults).contains(&Check::Receipt),
            "{name}, {}: {}",
            op.name,
            listed(&faults)
        );
    }
    ops.len()
}

/// An op that the config asks for and the forward lacks, or the other way round: the audit reads
/// another config than the prediction did.
#[test]
fn an_op_missing_from_the_forward_is_caught_by_the_audit() {
    type Change = fn(&mut ModelConfig);
    let changes: [(&str, &str, Change); 8] = [
        ("no shared expert", DEEPSEEK, |config| config.shared_ffn = 0),
        ("no dense layers", DEEPSEEK, |config| {
            config.dense_layers = 0
        }),
        ("one dense layer less", DEEPSEEK, |config| {
            config.dense_layers -= 1
        }),
        ("no norm of queries and keys", MINIMAX, |config| {
            config.qk_norm = None
        }),
        ("norms per head", MINIMAX, |config| {
            config.qk_norm = Some(QkNorm::PerHead);
        }),
        ("no gate", QWEN, |config| config.gated_attention = false),
        ("no shared expert", QWEN_SGLANG, |config| {
            config.shared_ffn = 0
        }),
        ("one linear layer less", QWEN_SGLANG, |config| {
            if let Some(net) = &mut config.deltanet {
                net.layers[0] = false;
            }
        }),
    ];
    for (what, name, change) in changes {
        let case = serving_case(name);
        let scenario = case.scenario();
        let mut configs = configs().clone();
        change(
            configs
                .get_mut(&scenario.deployment.model)
                .expect("the model has a config"),
        );
        let verdict = audit(&scenario, &configs, &predict(&case, Policy::Strict));
        let faults = verdict.expect_err(what);
        // Seen at the first lookup that has no row, or in the times.
        let seen = [Check::Lookup, Check::Times];
        let seen = seen.iter().any(|check| checks(&faults).contains(check));
        assert!(seen, "{name}, {what}: {}", listed(&faults));
    }
}

/// A case whose prompts are cut, and the piece that goes on first.
fn cut_case() -> (Case, Prediction, (u32, u32, u32)) {
    let case = serving_case("qwen3.5-397b-a17b/b300-sglang-fp8/tp4/8192-1024-c32");
    let prediction = predict(&case, Policy::Strict);
    let steps = prediction.log.iterations.iter();
    let ranks = steps.filter_map(|iteration| Some(&iteration.step.as_ref()?.1[0]));
    let piece = ranks
        .flat_map(|rank| rank.context.iter().zip(&rank.chunks))
        .map(|(request, (before, tokens))| (*request, *before, *tokens))
        .find(|(_, before, _)| *before > 0)
        .expect("some prompt is cut");
    (case, prediction, piece)
}

/// As if a piece of a prompt attended to itself alone.
#[test]
fn a_piece_without_what_lies_before_it_is_caught_by_the_audit() {
    let (case, honest, (request, before, tokens)) = cut_case();
    let scenario = case.scenario();
    let composer = points().replayer().composer(&scenario, Policy::Strict);
    let Ok(Ok(mut composer)) = composer else {
        panic!("the case is not composed");
    };
    let attends = |op: &Op| matches!(op.key, OpKey::ContextAttention(_));
    let op = composer.plan().ops.iter().position(attends);
    let op = OpIndex(op.expect("there is attention") as u16);
    let mut faulty = honest.clone();
    let weight = 1.0 / honest.log.requests.len() as f64;
    for (sign, prefixes) in [(1.0, vec![]), (-1.0, vec![before])] {
        let load = RankLoad {
            prompts: vec![tokens],
            prefixes,
            ..RankLoad::default()
        };
        let lookup = composer.price_alone(op, &load);
        for term in composer.pricer().terms(lookup) {
            let coefficient = sign * weight * term.coefficient();
            let row_ms = honest.rows.ms(term.row);
            add_to(
                &mut faulty.ttft_receipt,
                Part::Kernel,
                term.row,
                coefficient,
                row_ms,
            );
        }
    }
    let moved_ms = honest.ttft_receipt.total_ms() - faulty.ttft_receipt.total_ms();
    assert!(moved_ms > 1e-6, "request {request} moves {moved_ms} ms");
    assert_audit_sees("a piece alone", &case, faulty);
}

#[test]
fn false_decisions_of_sglang_are_caught_by_the_audit() {
    let (case, honest, piece) = cut_case();
    let is_cut = |rank: &RankRecord| {
        let pieces = rank.context.iter().zip(&rank.chunks);
        let mut pieces = pieces.map(|(request, (before, tokens))| (*request, *before, *tokens));
        pieces.any(|known| known == piece)
    };
    type Of<'a> = &'a dyn Fn(&RankRecord) -> bool;
    type Lie = fn(&mut RankRecord);
    let lies: [(&str, Of<'_>, Lie); 5] = [
        ("a longer prefix", &is_cut, |rank| rank.chunks[0].0 += 1),
        ("a shorter piece", &is_cut, |rank| rank.chunks[0].1 -= 1),
        ("whole prompts", &is_cut, |rank| rank.chunks.clear()),
        ("another order", &|rank| rank.context.len() > 1, |rank| {
            rank.context.reverse();
        }),
        ("a request less", &|rank| rank.generation > 1, |rank| {
            rank.generation -= 1;
        }),
    ];
    for (what, of, lie) in lies {
        let mut faulty = honest.clone();
        let mut steps = faulty.log.iterations.iter_mut();
        let lied = steps.find_map(|iteration| {
            let (_, ranks) = iteration.step.as_mut()?;
            of(&ranks[0]).then(|| lie(&mut ranks[0]))
        });
        assert!(lied.is_some(), "{what} fits nowhere");
        let faults = audited(&case, &faulty).expect_err(what);
        let seen = checks(&faults).contains(&Check::Decisions);
        assert!(seen, "{what}: {}", listed(&faults));
    }
}

#[test]
fn false_decisions_of_tensorrt_llm_are_caught_by_the_audit() {
    type Lie = fn(&mut IterationRecord) -> bool;
    let padded = "deepseek-r1-0528/b200-trtllm-fp4/dp8-ep8/1024-1024-c128";
    let lies: [(&str, &str, Lie); 5] = [
        ("more captured tokens", padded, |iteration| {
            match &mut iteration.step {
                Some((Execution::Piecewise { captured_tokens }, _)) => *captured_tokens += 1,
                _ => return false,
            }
            true
        }),
        (
            "eager for piecewise",
            padded,
            |iteration| match &mut iteration.step {
                Some((execution @ Execution::Piecewise { .. }, _)) => {
                    *execution = Execution::Eager;
                    true
                }
                _ => false,
            },
        ),
        ("a larger graph", MINIMAX, |iteration| {
            match &mut iteration.step {
                Some((Execution::FullGraph { captured_batch }, _)) => *captured_batch += 1,
                _ => return false,
            }
            true
        }),
        ("a pause where requests enter whole", CASE, |iteration| {
            let decodes = iteration.kind() == Some(StepKind::Decode);
            iteration.paused = if decodes { vec![0] } else { vec![] };
            decodes
        }),
        ("a pause of who does not run", MINIMAX, |iteration| {
            iteration.paused = vec![u32::MAX];
            true
        }),
    ];
    for (what, name, lie) in lies {
        let case = serving_case(name);
        let mut faulty = predict(&case, Policy::Strict);
        let lied = faulty.log.iterations.iter_mut().any(lie);
        assert!(lied, "{what} fits nowhere");
        let faults = audited(&case, &faulty).expect_err(what);
        let seen = checks(&faults).contains(&Check::Decisions);
        assert!(seen, "{what}: {}", listed(&faults));
    }
}

#[test]
fn a_peek_at_silicon_is_caught_by_blindness() {
    let case = serving_case(CASE);
    let honest = |_: &Case| "ttft_ms: 48.1\n".to_owned();
    assert_eq!(blindness(CASE, &case, honest), Ok(()));
    // The lines that compare with silicon may differ, and no others.
    let compares = |case: &Case| {
        let silicon = case.silicon.as_ref().map_or(0.0, |silicon| silicon.ttft_ms);
        format!("silicon: {silicon}\nttft_ms: 48.1\n  error_pct: {silicon}\n")
    };
    assert_eq!(blindness(CASE, &case, compares), Ok(()));
    let peeks: BTreeMap<&str, fn(&Case) -> String> = BTreeMap::from([
        (
            "silicon",
            (|case: &Case| {
                let silicon = case.silicon.as_ref().map_or(0.0, |silicon| silicon.ttft_ms);
                format!("ttft_ms: {}\n", 0.5 * (47.0 + silicon))
            }) as fn(&Case) -> String,
        ),
        ("point", |case| format!("ttft_ms: {:?}\n", case.point)),
        ("path", |case| format!("ttft_ms: {}\n", case.file.display())),
        ("tolerance", |case| {
            format!("ttft_ms: {:?}\n", case.tolerance)
        }),
    ]);
    for (what, peek) in peeks {
        let failure = blindness(CASE, &case, peek).expect_err(what);
        assert_eq!(failure.proof, Proof::Blindness, "{what}");
        assert!(failure.what.starts_with("`ttft_ms: "), "{failure}");
    }
    let seeing = serde_json::json!({ "workload": { "silicon": 48.3 } });
    let failure = sees_no_answer(CASE, &seeing).expect_err("the key shows");
    assert_eq!(failure.what, "its scenario has a key `silicon`");
}

/// A copy of the host data with one text replaced by another.
fn with_host_rows(from: &str, to: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let host = folder.path().join("host");
    fs::create_dir_all(host.join("sources")).expect("a folder can be made");
    let source = Path::new(ROOT).join("data/host");
    let mut replaced = 0;
    for (under, ending) in [("", "yaml"), ("sources", "csv")] {
        for entry in fs::read_dir(source.join(under)).expect("the folder lists") {
            let path = entry.expect("the folder lists").path();
            if path.extension().is_none_or(|known| known != ending) {
                continue;
            }
            let text = fs::read_to_string(&path).expect("the file reads");
            replaced += text.matches(from).count();
            let name = path.file_name().expect("a file has a name");
            fs::write(host.join(under).join(name), text.replacen(from, to, 1))
                .expect("the file writes");
        }
    }
    assert!(replaced >= 1, "`{from}` is nowhere");
    folder
}

#[test]
fn rows_that_are_not_their_cells_are_caught_by_no_leak() {
    let source = "{ table: request_boundaries, row: ingress, column: mean of 120 requests }";
    for (from, to, says) in [
        // A measured value that its cell does not say.
        ("mean_ms: 30.041,", "mean_ms: 28.0,", "28 ms, but"),
        // By a hair.
        (
            "mean_ms: 30.041,",
            "mean_ms: 30.0410001,",
            "30.0410001 ms, but",
        ),
        // A difference that its cells do not make.
        ("mean_ms: 3.5075,", "mean_ms: 3.9,", "its cells come to"),
        // A cell that is nowhere, and one that stands twice.
        (
            "row: ingress, column: mean of 120",
            "row: ingress, column: mean of 12",
            "no source",
        ),
        (
            "per_repeat,ingress,repeat 1,",
            "request_boundaries,ingress,mean of 120 requests,2.6915,ms,native_metrics\n\
             per_repeat,ingress,repeat 1,",
            "stands 2 times",
        ),
        // An outcome of the run, entered as a measured row.
        (
            source,
            "{ table: request_boundaries, row: schedule to first token, column: mean of 120 \
             requests }",
            "is an outcome of a run",
        ),
        // An outcome dressed up as a difference of nothing.
        (
            "row: client minus server",
            "row: client ttft",
            "is an outcome of a run",
        ),
        // A figure of a run with module timing, entered as a plain one.
        (
            "total (module timing off), column: rank A",
            "36 layers, column: rank A",
            "is by module",
        ),
        (
            "observer: plain }",
            "observer: profiler }",
            "inflates what it times",
        ),
    ] {
        let data = with_host_rows(from, to);
        let failures = no_leak(data.path()).expect_err(to);
        let caught = failures
            .iter()
            .any(|failure| failure.proof == Proof::NoLeak && failure.what.contains(says));
        assert!(caught, "{to}: {failures:#?}");
    }
    let untouched = with_host_rows("rows:", "rows:");
    assert!(no_leak(untouched.path()).is_ok());
}

#[test]
fn rows_taken_in_another_mode_than_their_file_gives_are_caught_by_no_leak() {
    let prediction = predict(&serving_case(CASE), Policy::Estimate);
    let own = FiledRows::read(&Path::new(ROOT).join("data"));
    assert_eq!(as_filed(CASE, &prediction.rows, &own), Ok(()));
    for (from, to, says) in [
        (
            "execution: eager",
            "execution: unknown",
            "its file says \"unknown\"",
        ),
        ("rank: 1", "rank: 0", "taken as `rank: 1`"),
        (
            "phase: prefill_or_mixed",
            "phase: decode",
            "taken as `phase:",
        ),
        (
            "- id: gpt-oss-tp2-ingress",
            "- id: another",
            "no file of data/host has this row",
        ),
    ] {
        let data = with_host_rows(from, to);
        let filed = FiledRows::read(data.path());
        let failure = as_filed(CASE, &prediction.rows, &filed).expect_err(to);
        assert!(failure.what.contains(says), "{failure}");
    }
}

#[test]
fn tables_that_nobody_vouches_for_are_caught_by_no_leak() {
    let data = Path::new(ROOT).join("data");
    assert_eq!(tables_as_imported(&data), []);
    let inner = "systems/data/b200_sxm/moe/sglang/0.5.14/moe_perf.parquet";
    let own = tempfile::tempdir().expect("a folder can be made");
    let copied = own.path().join(inner);
    fs::create_dir_all(copied.parent().expect("a folder")).expect("a folder can be made");
    fs::copy(data.join(inner), &copied).expect("the table copies");
    let what = |folder: &Path| tables_as_imported(folder).remove(0).what;
    assert!(
        what(own.path()).contains("No such file"),
        "no provenance at all"
    );
    let provenance = "systems/PROVENANCE.yaml";
    fs::copy(data.join(provenance), own.path().join(provenance)).expect("the file copies");
    assert_eq!(tables_as_imported(own.path()), []);
    fs::rename(&copied, copied.with_file_name("other.parquet")).expect("the table moves");
    assert!(what(own.path()).contains("does not say where it comes from"));
}

/// As if a boundary had never been looked up: no row, no gap.
#[test]
fn a_boundary_left_out_unseen_is_caught_by_the_audit() {
    let case = serving_case(CASE);
    for policy in Policy::ALL {
        let honest = predict(&case, policy);
        for name in &honest.coverage.missing {
            let mut faulty = honest.clone();
            faulty.coverage.missing.remove(name);
            let faults = audited(&case, &faulty).expect_err(name);
            assert_eq!(checks(&faults), [Check::Rows], "{}", listed(&faults));
            assert!(faults[0].what.starts_with(name), "{}", listed(&faults));
        }
    }
}

#[test]
fn measured_ops_that_are_not_their_cells_are_caught() {
    let data = with_host_rows("moe_sum,8.040", "moe_sum,8.041");
    let cases: Vec<CaseFile> = cases().into_iter().map(|(_, case)| case).collect();
    let failures = measured_cells(data.path(), &cases).expect_err("the cell differs");
    assert_eq!(failures.len(), 1, "{failures:#?}");
    let data = with_host_rows("allreduce_norm_sum,1.601", "allreduce_norm_sum,1.602");
    let failures = measured_cells(data.path(), &cases).expect_err("the cell differs");
    // The op's value and the step's difference.
    assert_eq!(failures.len(), 2, "{failures:#?}");
}

#[test]
fn check_values_are_the_cells_they_name() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let source = data.join("host/sources/gpt-oss-120b-b200-tp2.csv");
    let cells = stepgate::perfdb::read_source_cells(&source).expect("cells");
    let checks = stepgate::gate::all_checks(&data).expect("check values");
    assert!(!checks.is_empty());
    for check in checks {
        let found: Vec<f64> = cells
            .iter()
            .filter(|(cell, _)| *cell == check.source)
            .map(|(_, value)| *value)
            .collect();
        assert_eq!(found, [check.value_ms], "{}", check.name);
    }
}
