//! Compiles in what the binary was built from: the digest of the timing sources and the compiler.

use std::env;
use std::path::Path;
use std::process::Command;

#[path = "src/gate/fingerprint.rs"]
#[expect(dead_code, reason = "the gate uses the rest")]
mod fingerprint;

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo names the package's folder");
    for inner in fingerprint::CODE {
        println!("cargo::rerun-if-changed={inner}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/gate/fingerprint.rs");
    let code = fingerprint::code_of(Path::new(&root)).expect("the sources can be read");
    println!("cargo::rustc-env=STEPGATE_CODE={code}");
    println!("cargo::rustc-env=STEPGATE_COMPILER={}", compiler());
}

/// What the compiler calls itself, for example `rustc 1.95.0 (59807616e 2026-04-14)`.
fn compiler() -> String {
    let rustc = env::var("RUSTC").expect("cargo names the compiler");
    let output = Command::new(rustc).arg("--version").output();
    let version = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&version).trim().to_owned()
}
