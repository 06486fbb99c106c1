//! A line on a terminal's standard error, once a command has run for a second.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

pub struct Progress {
    begun: Instant,
    shown: bool,
}

impl Progress {
    pub fn new() -> Self {
        Self {
            begun: Instant::now(),
            shown: false,
        }
    }

    pub fn show(&mut self, line: impl FnOnce() -> String) {
        if self.begun.elapsed() > Duration::from_secs(1) && io::stderr().is_terminal() {
            eprint!("\r{}", line());
            let _ = io::stderr().flush();
            self.shown = true;
        }
    }

    pub fn clear(&mut self) {
        if self.shown {
            eprint!("\r\x1b[2K");
            self.shown = false;
        }
    }
}
