//! Calls that block a host thread until the GPU is done, and who makes them.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::event::{Call, HostEvent, Mark, NameId, Profile, Span};
use super::interval::sum_ns;

/// Blocking calls of one kind from one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Blocking {
    /// Name of the call.
    pub call: String,
    /// The innermost mark around it on its thread, with `*` for its numbers; `None`: no mark.
    pub caller: Option<String>,
    pub count: usize,
    pub total_ns: i64,
    pub longest_ns: i64,
}

/// Blocking calls by name and caller, the longest total first.
pub(super) fn blocking(profile: &Profile) -> Vec<Blocking> {
    let mut groups: BTreeMap<(String, Option<String>), Vec<i64>> = BTreeMap::new();
    let mut callers = Callers::default();
    let mut marks = profile.marks.iter().peekable();
    for event in &profile.host {
        while let Some(mark) = marks.next_if(|mark| mark.span.start_ns <= event.span.start_ns) {
            callers.enter(mark);
        }
        if event.call == Call::Synchronise {
            let caller = callers.innermost(event);
            groups
                .entry((
                    profile.names.text(event.name).to_owned(),
                    caller.map(|name| without_numbers(profile.names.text(name))),
                ))
                .or_default()
                .push(event.span.ns());
        }
    }
    let mut rows: Vec<Blocking> = groups
        .into_iter()
        .map(|((call, caller), times_ns)| Blocking {
            call,
            caller,
            count: times_ns.len(),
            total_ns: sum_ns(times_ns.iter().copied()),
            longest_ns: times_ns.into_iter().max().unwrap_or(0),
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.total_ns));
    rows
}

/// The marks that are open on each thread, outermost first.
#[derive(Default)]
struct Callers(HashMap<u64, Vec<(Span, NameId)>>);

impl Callers {
    fn enter(&mut self, mark: &Mark) {
        let open = self.0.entry(mark.thread).or_default();
        open.retain(|(span, _)| span.end_ns > mark.span.start_ns);
        open.push((mark.span, mark.name));
    }

    fn innermost(&self, event: &HostEvent) -> Option<NameId> {
        let open = self.0.get(&event.thread)?;
        open.iter()
            .rev()
            .find(|(span, _)| span.end_ns >= event.span.end_ns)
            .map(|(_, name)| *name)
    }
}

/// `ProfilerStep#12` as `ProfilerStep#*`: what differs in a number of its own is one place. Digits
/// of a word, as in `conv2d`, stay.
pub(super) fn without_numbers(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    let mut before = None;
    for letter in name.chars() {
        if !letter.is_ascii_digit() || before.is_some_and(char::is_alphabetic) {
            text.push(letter);
            before = Some(letter);
        } else if before != Some('*') {
            text.push('*');
            before = Some('*');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_their_own_become_stars() {
        for (name, text) in [
            ("ProfilerStep#12", "ProfilerStep#*"),
            ("step_3: 12 prompts", "step_*: * prompts"),
            ("aten::conv2d", "aten::conv2d"),
        ] {
            assert_eq!(without_numbers(name), text);
        }
    }
}
