//! Runs the benches. `cargo xtask bench` builds this program in release mode and calls it.

use std::io::{stderr, stdout};
use std::process::ExitCode;

#[expect(clippy::disallowed_methods, reason = "a tool's own terminal")]
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let code = farflung_repro::main(&args, &mut stdout(), &mut stderr());
    ExitCode::from(code)
}
