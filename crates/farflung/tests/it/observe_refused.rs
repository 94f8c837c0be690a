//! Builds without a feature report which feature a flag needs, before the run.

use crate::tiny::{Run, farflung};

#[test]
fn a_flag_of_a_feature_that_is_missing_names_it() {
    let flags = [
        ("prometheus", "--prometheus 0", cfg!(feature = "prometheus")),
        ("otlp", "--otlp http://127.0.0.1:1", cfg!(feature = "otlp")),
        ("tensorboard", "--tensorboard events", cfg!(feature = "tensorboard")),
    ];
    for (feature, flag, _) in flags.into_iter().filter(|(.., has)| !has) {
        let run = Run::new();
        let output = farflung().args(run.args(&format!("--steps 1 {flag}"))).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{feature}");
        assert!(said.contains(&format!("build it with `--features {feature}`")), "{said}");
    }
}
