//! Same input, same bytes: whatever the order, the number of threads or what else a process has
//! predicted before.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use stepgate::gate::{Points, render};

fn open() -> Points {
    Points::open(Path::new(env!("CARGO_MANIFEST_DIR")), None).expect("the project folder")
}

fn text(points: &Points, name: &str) -> String {
    let case = points.case(name).expect("a valid case");
    render(&points.predict(case).expect("well-formed data"))
}

/// Texts of `names`, by position, worked on by `threads` threads over one database.
fn texts(names: &[String], threads: usize) -> Vec<String> {
    let points = open();
    let next = AtomicUsize::new(0);
    let texts = Mutex::new(vec![String::new(); names.len()]);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let at = names.iter().position(|other| other == name);
                    let text = text(&points, name);
                    texts.lock().expect("no panic")[at.expect("its own name")] = text;
                }
            });
        }
    });
    texts.into_inner().expect("no panic")
}

#[test]
fn threads_and_order_change_no_byte() {
    let names = open().names().expect("the cases");
    let in_order = texts(&names, 1);
    // A fixed permutation: a stride that shares no factor with the number of cases.
    let count = names.len();
    let stride = (count / 2..).find(|stride| gcd(*stride, count) == 1);
    let stride = stride.expect("some stride");
    let order: Vec<usize> = (0..count).map(|at| at * stride % count).collect();
    let shuffled: Vec<String> = order.iter().map(|at| names[*at].clone()).collect();
    let by_two = texts(&shuffled, 2);
    for (position, at) in order.into_iter().enumerate() {
        assert_eq!(by_two[position], in_order[at], "{}", names[at]);
    }
}

#[test]
fn a_process_of_its_own_changes_no_byte() {
    let points = open();
    let names = points.names().expect("the cases");
    // Every system and runtime, with what else the process has read and without.
    for name in names.iter().step_by(29) {
        assert_eq!(text(&points, name), text(&open(), name), "{name}");
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
