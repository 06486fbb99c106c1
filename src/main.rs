use std::process::ExitCode;

fn main() -> ExitCode {
    stepgate::cli::run()
}
