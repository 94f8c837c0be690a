//! The `farflung` binary: the command line, in `cli`, over the library of this crate.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
