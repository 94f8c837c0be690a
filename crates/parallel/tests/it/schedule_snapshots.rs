//! Snapshots of every schedule at two sizes: the drawing and the lowered lists.

use farflung_base::Nanos;
use farflung_parallel::pipeline::{
    Boundary, Lowering, Method, PipelineCost, Schedule, Settings, StageCost, simulate,
};
use farflung_parallel::render;

#[test]
fn grids_and_lowered_lists() {
    for method in Method::ALL {
        for (p, m) in [(2, 4), (4, 8)] {
            let settings = Settings { slices: 2, ..Settings::new(p, m) };
            let order = method.order(&settings).unwrap();
            let mut stage = StageCost::UNIT;
            if method == Method::TeraPipe {
                // The microbatch has two slices of one unit each.
                stage.forward = stage.forward * 2;
                stage.input = stage.input * 2;
                stage.weight = stage.weight * 2;
            }
            let cost = PipelineCost::uniform(&order, stage, Boundary::latency(Nanos::ZERO));
            let grid = render::cells(&simulate(&order, &cost).unwrap().timeline(), 1000).unwrap();
            let schedule = Schedule::new(order, &Lowering { replicas: true, ..Lowering::default() }).unwrap();
            let buffers = schedule.buffers();
            let text = format!("{grid}\n{schedule}\nbuffers {buffers}\n");
            insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true }, {
                insta::assert_snapshot!(format!("{method}-{p}x{m}"), text);
            });
        }
    }
}
