//! Map of a placement: a row per pipeline, a column per stage, a box per machine, coloured by region.

use std::fmt::Write as _;

use farflung_base::{Rank, Topology};

use crate::Cluster;

const LEFT: usize = 24;
const TOP: usize = 56;
const BOX: [usize; 2] = [132, 40];
const GAP: [usize; 2] = [92, 16];

/// Okabe and Ito's palette without black and dark blue, and a violet.
const COLOURS: [&str; 7] = ["#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#9999cc"];

/// Draws as a standalone SVG which machine has which stage of which pipeline, and the links between neighbours.
///
/// `pipelines` are ranks of `cluster` by stage; `stages` has a caption for each stage. Machines of the same
/// region have the same colour; without regions, machines of the same device entry do. A tooltip on each box
/// shows the machine's name and region.
///
/// # Panics
/// If a rank is not in the cluster or in `topology`.
#[must_use]
pub fn map(pipelines: &[Vec<Rank>], stages: &[String], cluster: &Cluster, topology: &Topology) -> String {
    let columns = pipelines.iter().map(Vec::len).max().unwrap_or_default();
    let width = 2 * LEFT + columns * BOX[0] + columns.saturating_sub(1) * GAP[0];
    let height = TOP + pipelines.len() * (BOX[1] + GAP[1]) + 8;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
        height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{width}\" height=\"{height}\" \
         fill=\"white\"/>\n"
    );
    let names = cluster.rank_names();
    let colours = colours(cluster);
    let left = |column: usize| LEFT + column * (BOX[0] + GAP[0]);
    let top = |row: usize| TOP + row * (BOX[1] + GAP[1]);
    for (column, stage) in stages.iter().enumerate() {
        let x = left(column) + BOX[0] / 2;
        let y = TOP - 16;
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", escaped(stage));
    }
    for (row, pipeline) in pipelines.iter().enumerate() {
        let middle = top(row) + BOX[1] / 2;
        for (column, pair) in pipeline.windows(2).enumerate() {
            let (from, to) = (left(column) + BOX[0], left(column + 1));
            let (rate, latency) = (topology.rate(pair[0], pair[1]), topology.link(pair[0], pair[1]).latency);
            let x = from.midpoint(to);
            let _ = writeln!(
                svg,
                "<line x1=\"{from}\" y1=\"{middle}\" x2=\"{to}\" y2=\"{middle}\" stroke=\"#555\"/>\n<text \
                x=\"{x}\" \
                 y=\"{}\" text-anchor=\"middle\" font-size=\"9\">{}</text>\n<text x=\"{x}\" y=\"{}\" \
                 text-anchor=\"middle\" \
                 font-size=\"9\">{}</text>",
                middle - 4,
                escaped(&rate.to_string()),
                middle + 11,
                escaped(&latency.to_string()),
            );
        }
        for (column, rank) in pipeline.iter().enumerate() {
            let (x, y, [w, h]) = (left(column), top(row), BOX);
            let name = escaped(&names[rank.index()]);
            let region = cluster.ranks().nth(rank.index()).and_then(|machine| machine.region.as_deref());
            let region = escaped(region.unwrap_or(""));
            let _ = writeln!(
                svg,
                "<g><title>{name} {region}</title><rect x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\" \
                rx=\"4\" \
                 fill=\"{}\"/><text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{name}</text><text x=\"{}\" \
                 y=\"{}\" \
                 text-anchor=\"middle\" font-size=\"9\">{region}</text></g>",
                COLOURS[colours[rank.index()] % COLOURS.len()],
                x + w / 2,
                y + 18,
                x + w / 2,
                y + 32,
            );
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// Returns the colour number of each rank, by its region or its device entry.
fn colours(cluster: &Cluster) -> Vec<usize> {
    let of = |(entry, machine): (usize, &crate::Machine)| {
        let region = machine.region.as_ref();
        let number = region.and_then(|name| cluster.regions.iter().position(|region| region.name == *name));
        vec![number.unwrap_or(cluster.regions.len() + entry); machine.count as usize]
    };
    cluster.devices.iter().enumerate().flat_map(of).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shipped;

    #[test]
    fn every_machine_has_a_box_and_neighbours_a_line() {
        let cluster = shipped::cluster("spot").unwrap();
        let topology = cluster.topology().unwrap();
        let rows: Vec<Vec<Rank>> =
            (0..5).map(|row| (0..4).map(|column| Rank(4 * row + column)).collect()).collect();
        let stages: Vec<String> = (0..4).map(|stage| format!("stage <{stage}>")).collect();
        let svg = map(&rows, &stages, &cluster, &topology);
        let count = |text: &str| svg.matches(text).count();
        assert_eq!((count("<g>"), count("<line "), count("stage &lt;")), (20, 15, 4));
        for name in cluster.rank_names() {
            assert_eq!(count(&format!("<title>{name} ")), 1, "{name}");
        }
        assert!(svg.ends_with("</svg>\n") && !svg.contains("<0>"));
        assert!(map(&[], &[], &cluster, &topology).contains("</svg>"));
    }
}
