//! Which cases a command works on, and predicting them on every core.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use crate::case::CaseFile;
use crate::gate::{Points, Predicted};
use crate::timing::InputError;

use super::progress::Progress;

/// A case by the name it is reported under.
pub struct Selected {
    pub name: String,
    pub case: CaseFile,
}

/// Cases by name, by folder of names, or by file path; all of them where none is asked for.
pub fn select(points: &Points, wanted: &[String]) -> Result<Vec<Selected>, InputError> {
    let mut selected = Vec::new();
    let mut all: Option<Vec<String>> = None;
    if wanted.is_empty() {
        for name in points.names()? {
            let case = points.case(&name)?;
            selected.push(Selected { name, case });
        }
        return Ok(selected);
    }
    for name in wanted {
        if Path::new(name).extension().is_some_and(|end| end == "yaml") {
            let case = points.load(Path::new(name))?;
            selected.push(Selected {
                name: name.clone(),
                case,
            });
            continue;
        }
        let folder = name.trim_end_matches('/');
        if all.is_none() {
            all = Some(points.names()?);
        }
        let under: Vec<&String> = all
            .iter()
            .flatten()
            .filter(|known| {
                known
                    .strip_prefix(folder)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
            .collect();
        if under.is_empty() {
            // An exact name gets the located error of a missing or escaping path.
            let case = points.case(folder)?;
            selected.push(Selected {
                name: folder.to_owned(),
                case,
            });
        }
        for name in under {
            selected.push(Selected {
                name: name.clone(),
                case: points.case(name)?,
            });
        }
    }
    // A case that two names ask for counts once.
    let mut seen = BTreeSet::new();
    selected.retain(|one| seen.insert(one.name.clone()));
    Ok(selected)
}

/// Predicts on every core and hands the results to `each` in the order of `selected`.
pub fn predict_all(
    points: &Points,
    selected: Vec<Selected>,
    mut each: impl FnMut(String, Predicted) -> io::Result<()>,
) -> Result<(), super::run::Stop> {
    on_every_core(
        selected,
        |one| Ok((one.name, points.predict(one.case)?)),
        |(name, predicted)| each(name, predicted),
    )
}

/// Works on every core and hands the results to `each` in the order of `selected`.
pub fn on_every_core<T: Send>(
    selected: Vec<Selected>,
    work: impl Fn(Selected) -> Result<T, InputError> + Sync,
    mut each: impl FnMut(T) -> io::Result<()>,
) -> Result<(), super::run::Stop> {
    let total = selected.len();
    let queue: Vec<_> = selected
        .into_iter()
        .map(|one| std::sync::Mutex::new(Some(one)))
        .collect();
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut waiting: Vec<Option<Result<T, InputError>>> = (0..total).map(|_| None).collect();
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..threads.min(total) {
            let (sender, next, queue, work) = (sender.clone(), &next, &queue, &work);
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(slot) = queue.get(at) else { return };
                    let one = slot.lock().ok().and_then(|mut slot| slot.take());
                    if let Some(one) = one
                        && sender.send((at, work(one))).is_err()
                    {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut progress = Progress::new();
        let (mut done, mut shown) = (0, 0);
        for (at, result) in receiver {
            waiting[at] = Some(result);
            done += 1;
            progress.show(|| format!("predicted {done} of {total} cases"));
            while let Some(ready) = waiting.get_mut(shown).and_then(Option::take) {
                progress.clear();
                each(ready?)?;
                shown += 1;
            }
        }
        progress.clear();
        Ok(())
    })
}
