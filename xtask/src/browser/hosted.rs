//! The page of a run that machines join and leave: two pipelines, a member without a part, and a member that is
//! killed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::devtools::Browser;
use super::{PATIENCE, Process, document, watch};
use crate::shell;

const SETTINGS: &str = "--sync ddp --stages 2 --layers 4 --heads 2 --dim 64 --context 64 --batch 2 \
    --microbatches 2 --lr 0.004 --steps 5000 --deadline 10s --eval-every 20 --eval-batches 2 --sample-tokens 0";
/// Number of members: two pipelines of two, and one without a part.
const MEMBERS: usize = 5;
/// The member that is killed. It has a part.
const VICTIM: usize = 2;

/// Starts a member with the folder `number`.
fn member(binary: &Path, folder: &Path, number: usize) -> Result<Process> {
    let mut command = Command::new(binary);
    if number == 0 {
        command.arg("host").args(SETTINGS.split_whitespace());
    } else {
        command.args(["join", "--ticket-file"]).arg(folder.join("0/run.ticket"));
    }
    command
        .args(["--listen", "127.0.0.1:0", "--threads", "1", "--quiet", "--data"])
        .arg(folder.join("text.txt"));
    command.arg("--out").arg(folder.join(number.to_string()));
    command.env("FARFLUNG_HOME", folder.join(format!("home-{number}")));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(Process(command.spawn().context("failed to start a member")?))
}

/// Starts members one after the other, kills one, and checks where the page draws them. The picture of the
/// documentation is written only if it does not exist.
pub(super) fn check(binary: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let texts =
        ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(|name| fs::read(shell::root().join(name)));
    fs::write(folder.join("text.txt"), texts.into_iter().collect::<std::io::Result<Vec<_>>>()?.concat())?;

    let mut members = vec![member(binary, folder, 0)?];
    let ticket = folder.join("0/run.ticket");
    let waited = (0..1800).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        ticket.exists()
    });
    ensure!(waited, "the host wrote no ticket");
    let (watching, address) = watch(binary, &folder.join("0"), Some(&ticket))?;
    let mut browser = Browser::start(folder)?;
    browser.look(1080, 0.8, "light")?;
    browser.call("Page.navigate", &json!({ "url": address }))?;
    let drawn =
        |what: &str, count: usize| format!("document.querySelectorAll('#members {what}').length === {count}");
    for count in 1..=MEMBERS {
        browser.wait_for(
            &format!("{count} members are drawn"),
            &drawn("circle.node.here", count),
            PATIENCE,
        )?;
        if count < MEMBERS {
            members.push(member(binary, folder, count)?);
        }
    }
    let pipelines = [drawn("path.link.activations", 2), drawn("path.link.averages", 2)].join(" && ");
    browser.wait_for("two pipelines are drawn, and their averages", &pipelines, PATIENCE)?;
    let stages = "document.getElementById('facts').textContent.includes('5 members, 2 stages')";
    browser.wait_for("the page tells the number of stages", stages, PATIENCE)?;

    drop(members.remove(VICTIM));
    let lost =
        "[...document.querySelectorAll('#events .said')].some(said => said.textContent.includes(' lost'))";
    browser.wait_for("the loss of a member is among the events", lost, PATIENCE)?;
    browser.wait_for("the others are drawn", &drawn("circle.node.here", MEMBERS - 1), PATIENCE)?;
    browser.wait_for("the member without a part is in a pipeline now", &pipelines, PATIENCE)?;
    members.push(member(binary, folder, MEMBERS)?);
    browser.wait_for("a newcomer is drawn", &drawn("circle.node.here", MEMBERS), PATIENCE)?;
    let picture = browser.picture()?;
    fs::write(folder.join("members.png"), &picture)?;
    let errors = &browser.heard.errors;
    ensure!(errors.is_empty(), "the console has errors:\n  {}", errors.join("\n  "));
    drop(watching);
    println!("browser: members that came and went were drawn at their stages, and a loss was told");
    document(&picture, "members.png")
}
