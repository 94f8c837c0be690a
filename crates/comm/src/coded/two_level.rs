//! A coded all-reduce in two levels: plain inside a region, coded between regions.

use std::ops::Range;

use farflung_base::Rank;

use crate::grouped::{owned, place};
use crate::steps::{Code, CodedMessage, Coding, Merge, Phase, Program, Step};

/// Returns an all-reduce in two levels. Inside a region, members send each other plain f32, and each sums its
/// part of the buffer. Then the owners of a part in all regions exchange it through the codec. At the end,
/// members send their parts plainly to their region.
///
/// - Two regions: each owner encodes its region's sum once, and both add up the two decoded sums in the order
///   of regions. The encoded buffer crosses each region's shared line once in each direction, in one latency.
/// - More regions: the part is cut into one block per region, which the owners reduce by a scatter-gather in
///   two latencies. With `m` regions, `2 (m - 1) / m` encoded buffers cross a line in each direction. A
///   region's own values in the block that it reduces are not encoded for the sum.
///
/// The traffic of a region's line does not depend on the number of its members. Regions may differ in size.
/// Each rank must be in exactly one region.
#[must_use]
pub fn two_level(rank: Rank, regions: &[Vec<Rank>]) -> Program {
    let Some((home, me)) = place(rank, regions) else { return Program::new(1, Vec::new()) };
    let widest = regions.iter().map(Vec::len).max().unwrap_or(1);
    let pieces = if regions.len() > 2 { regions.len() } else { 1 };
    let mut list = List::default();
    let region = &regions[home];
    let members = || region.iter().copied().enumerate().filter(|&(l, _)| l != me);
    let columns = |l: usize| owned(widest, l, region.len());
    let blocks = |l: usize| columns(l).start * pieces..columns(l).end * pieces;

    let mut inside = Coding::default();
    for (l, member) in members() {
        blocks(l).for_each(|block| list.send(&mut inside, &[member], block, Code::Plain));
        for block in blocks(me) {
            let message = list.receive(&mut inside, member, block, Code::Plain);
            inside.decode.push((message, Merge::Reduce));
        }
    }
    list.end_step(inside);

    let owner = |column: usize, region: &[Rank]| {
        (0..region.len()).find(|&l| owned(widest, l, region.len()).contains(&column)).map(|l| region[l])
    };
    let owners = |column: usize| -> Vec<Rank> { regions.iter().filter_map(|r| owner(column, r)).collect() };
    let across = Across { home, pieces };
    across.reduce(&mut list, columns(me), &owners);

    let mut inside = Coding::default();
    for (l, member) in members() {
        for block in blocks(l) {
            let message = list.receive(&mut inside, member, block, Code::Plain);
            inside.decode.push((message, Merge::Copy));
        }
    }
    let others: Vec<Rank> = members().map(|(_, member)| member).collect();
    blocks(me).for_each(|block| list.send(&mut inside, &others, block, Code::Plain));
    list.end_step(inside);
    Program { messages: list.messages, ..Program::new(widest * pieces, list.steps) }
}

/// Messages and steps of a program while it is built.
#[derive(Default)]
struct List {
    messages: Vec<CodedMessage>,
    steps: Vec<Step>,
}

impl List {
    fn message(&mut self, block: usize, code: Code) -> usize {
        self.messages.push(CodedMessage { block, code });
        self.messages.len() - 1
    }

    /// Encodes a block and sends it to the given ranks, if there are any.
    fn send(&mut self, step: &mut Coding, to: &[Rank], block: usize, code: Code) {
        if !to.is_empty() {
            self.encode(step, to, block, code);
        }
    }

    /// Encodes a block and sends it to the given ranks; returns the message's index.
    fn encode(&mut self, step: &mut Coding, to: &[Rank], block: usize, code: Code) -> usize {
        let message = self.message(block, code);
        step.encode.push(message);
        step.sends.extend(to.iter().map(|&to| (to, message)));
        message
    }

    fn receive(&mut self, step: &mut Coding, from: Rank, block: usize, code: Code) -> usize {
        let message = self.message(block, code);
        step.recvs.push((from, message));
        message
    }

    fn end_step(&mut self, coding: Coding) {
        if !coding.is_empty() {
            self.steps.push(Step { coding, ..Step::default() });
        }
    }
}

/// The exchange between regions, from the view of one of them.
struct Across {
    home: usize,
    pieces: usize,
}

impl Across {
    /// Adds the steps that reduce this rank's columns with their owners in the other regions.
    fn reduce(&self, list: &mut List, columns: Range<usize>, owners: &dyn Fn(usize) -> Vec<Rank>) {
        let Self { home, pieces } = *self;
        let others = |owners: &[Rank]| -> Vec<Rank> {
            owners.iter().enumerate().filter(|&(region, _)| region != home).map(|(_, &owner)| owner).collect()
        };
        if pieces == 1 {
            let mut gather = Coding::default();
            for block in columns {
                let owners = owners(block);
                let code = Code::Coded(Phase::Server);
                let own = list.encode(&mut gather, &others(&owners), block, code);
                for (region, &owner) in owners.iter().enumerate() {
                    let message =
                        if region == home { own } else { list.receive(&mut gather, owner, block, code) };
                    gather.decode.push((message, if region == 0 { Merge::Copy } else { Merge::Reduce }));
                }
            }
            list.end_step(gather);
            return;
        }
        let (mut scatter, mut gather) = (Coding::default(), Coding::default());
        for column in columns {
            let owners = owners(column);
            let block = |region: usize| column * pieces + region;
            for (region, &owner) in owners.iter().enumerate().filter(|&(region, _)| region != home) {
                list.send(&mut scatter, &[owner], block(region), Code::Coded(Phase::Worker));
                let part = list.receive(&mut scatter, owner, block(home), Code::Coded(Phase::Worker));
                scatter.decode.push((part, Merge::Reduce));
                let result = list.receive(&mut gather, owner, block(region), Code::Coded(Phase::Server));
                gather.decode.push((result, Merge::Copy));
            }
            let own = list.encode(&mut gather, &others(&owners), block(home), Code::Coded(Phase::Server));
            gather.decode.push((own, Merge::Copy));
        }
        list.end_step(scatter);
        list.end_step(gather);
    }
}
