//! A pipeline schedule of one's own: written as a short function, checked, simulated, compared with known
//! schedules, and pinned by snapshot tests.

use farflung_parallel::ParallelError;
use farflung_parallel::pipeline::{
    Action, Boundary, ComputeKind, ComputeOrder, Lowering, Method, Op, PipelineCost, Placement, Schedule,
    Settings, StageCost, peaks, simulate,
};
use farflung_parallel::render;

/// Returns 1F1B with split backwards, in which weight gradients are computed one microbatch later. So the
/// gradient of the input, for which the previous stage waits, is sent earlier.
fn lagging(ranks: u32, microbatches: u32) -> Result<ComputeOrder, ParallelError> {
    let list = |rank: u32| {
        let warm_up = (ranks - 1 - rank).min(microbatches);
        let mut list: Vec<Op> = (0..warm_up).map(|m| Action::forward(rank, m).into()).collect();
        for m in 0..microbatches {
            if warm_up + m < microbatches {
                list.push(Action::forward(rank, warm_up + m).into());
            }
            list.push(Action::new(ComputeKind::BackwardInput, rank, m).into());
            if m > 0 {
                list.push(Action::new(ComputeKind::BackwardWeight, rank, m - 1).into());
            }
        }
        list.push(Action::new(ComputeKind::BackwardWeight, rank, microbatches - 1).into());
        list
    };
    ComputeOrder::new(Placement::looped(ranks, 1), microbatches, 1, (0..ranks).map(list).collect())
}

/// Returns the schedule's grid, its makespan, and the peak of activations that each rank holds.
fn picture(order: &ComputeOrder) -> Result<String, ParallelError> {
    let free = Boundary::latency("0ns".parse().expect("a time"));
    let simulation_cost = PipelineCost::uniform(order, StageCost::UNIT, free);
    let simulation = simulate(order, &simulation_cost)?;
    let grid = render::cells(&simulation.timeline(), 120).expect("it is narrow enough");
    Ok(format!("{grid}makespan {}, holds {:?}\n", simulation.makespan(), peaks(order)))
}

fn main() -> Result<(), ParallelError> {
    let mine = lagging(4, 6)?;
    print!("mine\n{}", picture(&mine)?);
    for method in [Method::OneFOneB, Method::ZbH1] {
        print!("{method}\n{}", picture(&method.order(&Settings::new(4, 6))?)?);
    }
    // The lists with sends and receives. `Schedule::new` proves that they match and that no rank waits forever.
    let schedule = Schedule::new(mine, &Lowering::default())?;
    println!("with {} buffers on a wire:\n{schedule}", schedule.buffers());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_is_pinned() {
        insta::assert_snapshot!("lagging_3_4", picture(&lagging(3, 4).unwrap()).unwrap());
    }

    #[test]
    fn what_ranks_exchange_is_pinned() {
        let schedule = Schedule::new(lagging(2, 2).unwrap(), &Lowering::default()).unwrap();
        insta::assert_snapshot!("lagging_2_2_lowered", schedule.to_string());
    }

    #[test]
    fn it_is_never_slower_than_1f1b() {
        let time = |order: &ComputeOrder| {
            let free = Boundary::latency("0ns".parse().unwrap());
            simulate(order, &PipelineCost::uniform(order, StageCost::UNIT, free)).unwrap().makespan()
        };
        for (p, m) in [(2, 2), (3, 5), (4, 8), (8, 32)] {
            let plain = Method::OneFOneB.order(&Settings::new(p, m)).unwrap();
            assert!(time(&lagging(p, m).unwrap()) <= time(&plain), "{p} {m}");
        }
    }
}
