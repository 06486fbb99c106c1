//! The same work on many things, on every core.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Results in the order of `items`, whoever finished first.
pub(super) fn on_every_core<I: Send, T: Send>(
    items: Vec<I>,
    work: impl Fn(I) -> T + Sync,
) -> Vec<T> {
    let total = items.len();
    let queue: Vec<_> = items
        .into_iter()
        .map(|item| Mutex::new(Some(item)))
        .collect();
    let done: Vec<Mutex<Option<T>>> = (0..total).map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(total) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let (Some(from), Some(to)) = (queue.get(at), done.get(at)) else {
                        return;
                    };
                    let item = from.lock().ok().and_then(|mut item| item.take());
                    let result = item.map(&work);
                    if let Ok(mut to) = to.lock() {
                        *to = result;
                    }
                }
            });
        }
    });
    done.into_iter()
        .filter_map(|slot| slot.into_inner().ok().flatten())
        .collect()
}
