//! What layers cost by running them on the counting device, against closed forms.

mod closed_forms;

use closed_forms::{figures, shapes};
use farflung_zoo as zoo;

#[test]
fn they_equal_the_closed_forms_exactly() {
    let shapes = shapes().unwrap();
    assert!(shapes.len() >= 70, "{}", shapes.len());
    for (shape, spec) in shapes {
        for figure in figures(&spec).unwrap() {
            assert_eq!(figure.profile, figure.closed_form, "{shape}: {}", figure.name);
        }
    }
}
