//! Which host call launched a piece of GPU work.

use std::collections::HashMap;

use super::event::{Call, GpuEvent, HostEvent, Profile};

/// Host calls by correlation.
pub(super) struct Launches<'a> {
    host: &'a [HostEvent],
    by_correlation: HashMap<u64, usize>,
}

impl<'a> Launches<'a> {
    pub fn of(profile: &'a Profile) -> Self {
        let host = profile.host.as_slice();
        let mut by_correlation = HashMap::new();
        for (at, event) in host.iter().enumerate() {
            let Some(correlation) = event.correlation else {
                continue;
            };
            by_correlation
                .entry(correlation)
                .and_modify(|known| {
                    if likely(&host[*known]) < likely(event) {
                        *known = at;
                    }
                })
                .or_insert(at);
        }
        Self {
            host,
            by_correlation,
        }
    }

    /// The call that launched `event`, where the profile shows it.
    pub fn launch(&self, event: &GpuEvent) -> Option<&'a HostEvent> {
        self.host.get(self.index(event)?)
    }

    /// Where that call stands among the profile's host calls.
    pub fn index(&self, event: &GpuEvent) -> Option<usize> {
        self.by_correlation.get(&event.correlation?).copied()
    }
}

/// Of two calls with one correlation, such as a driver call inside a runtime call, the likelier
/// one to have launched the work.
fn likely(event: &HostEvent) -> u8 {
    match event.call {
        call if call.submits() => 2,
        // A copy that blocks.
        Call::Synchronise => 1,
        _ => 0,
    }
}
