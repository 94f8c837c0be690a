//! `ci --only browser`: checks the page of `farflung watch` in headless Chromium, during a training run and
//! while members come and go.

mod devtools;
mod hosted;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use devtools::Browser;
use serde_json::Value;

use crate::workspace::Workspace;
use crate::{setup, shell};

/// Timeout for every condition.
const PATIENCE: Duration = Duration::from_mins(3);
/// Number of steps of the run, and of its first part.
const STEPS: u64 = 240;
const FIRST: u64 = 100;
/// Maximum size in bytes of the picture in the documentation.
const LARGEST: usize = 200_000;

/// Five machines, one of them slow: two in an office and three in homes.
const TOPOLOGY: &str = "default = \"50mbit,20ms\"

[[region]]
name = \"office\"
inside = \"1gbit,1ms\"
up = \"200mbit\"
down = \"200mbit\"

[[device]]
name = \"desk\"
count = 2
region = \"office\"
flops = \"3 GFLOPS\"
memory = \"8GB\"

[[device]]
name = \"anna\"
flops = \"3 GFLOPS\"
memory = \"8GB\"
up = \"50mbit\"
down = \"100mbit\"

[[device]]
name = \"bert\"
flops = \"1.6 GFLOPS\"
memory = \"8GB\"
up = \"20mbit\"
down = \"100mbit\"

[[device]]
name = \"cleo\"
flops = \"2.5 GFLOPS\"
memory = \"8GB\"
up = \"50mbit\"
down = \"100mbit\"
";

const SETTINGS: &str = "--workers 5 --sync ddp --codec int8 --layers 2 --heads 2 --dim 64 --context 64 --batch 2 \
    --lr 0.004 --threads 1 --sample-tokens 0 --eval-every 20 --eval-batches 2 --checkpoint-every 60";

/// Text that would have an effect if the page treated it as markup.
const HOSTILE: &str = "rank 3 <img src=x onerror=\"document.title='taken'\"> & <script>1</script>";

/// A child process, which is killed when this value is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Installs the browser if necessary, runs a training, and checks the page. Screenshots are written to
/// `target/watch`. The picture of the documentation is written only if it does not exist.
pub(crate) fn check() -> Result<()> {
    setup::browser()?;
    let target = Workspace::load()?.target_directory;
    shell::run(&mut shell::cargo(&["build", "--package", "farflung", "--features", "watch"]))?;
    let binary = target.join("debug/farflung");
    let folder = target.join("watch");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("failed to remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("homes.toml"), TOPOLOGY)?;
    let run = folder.join("homes");

    shell::run(&mut train(&binary, &run, FIRST))?;
    let mut training = Process(train(&binary, &run, STEPS).stderr(Stdio::null()).spawn()?);
    let (watching, address) = watch(&binary, &run, None)?;
    let mut browser = Browser::start(&folder)?;
    browser.look(1280, 1.0, "light")?;
    browser.call("Page.navigate", &serde_json::json!({ "url": address }))?;
    browser.wait_for("the page shows a step", "Number(document.body?.dataset.step) > 0", PATIENCE)?;
    let step = browser.value("Number(document.body.dataset.step)")?;
    browser.wait_for(
        "the page shows a later step",
        &format!("Number(document.body.dataset.step) > {step}"),
        PATIENCE,
    )?;
    let late = STEPS * 4 / 5;
    browser.wait_for(
        "most steps are done",
        &format!("Number(document.body.dataset.step) >= {late}"),
        PATIENCE,
    )?;
    browser.look(1080, 0.8, "light")?;
    let picture = browser.picture()?;
    fs::write(folder.join("running.png"), &picture)?;
    ensure!(training.0.wait()?.success(), "the training failed");
    browser.wait_for(
        "the run is finished",
        "document.getElementById('phasetext').textContent === 'finished'",
        PATIENCE,
    )?;

    the_curve_is_the_file(&mut browser, &run)?;
    tables_open(&mut browser)?;
    an_event_appears(&mut browser, &run)?;
    it_fits(&mut browser, &folder)?;
    let heard = &browser.heard;
    ensure!(heard.errors.is_empty(), "the console has errors:\n  {}", heard.errors.join("\n  "));
    let outside = heard.requests.iter().find(|url| !url.starts_with(&address) && !url.starts_with("data:"));
    ensure!(outside.is_none(), "the page requested {outside:?}, which is not its own server");
    println!(
        "browser: {} requests, all to the page's own server; no error in the console",
        heard.requests.len()
    );
    drop(watching);
    let said = "!document.getElementById('connection').hidden";
    browser.wait_for("the page says that the server no longer answers", said, PATIENCE)?;

    document(&picture, "watch.png")?;
    drop(browser);
    hosted::check(&binary, &folder.join("hosted"))?;
    println!("browser: pictures in {}", folder.display());
    Ok(())
}

/// Writes a picture of the documentation, unless it exists.
fn document(picture: &[u8], name: &str) -> Result<()> {
    ensure!(picture.len() < LARGEST, "the picture has {} bytes, at most {LARGEST}", picture.len());
    let documented = shell::root().join("docs").join(name);
    if !documented.exists() {
        fs::write(&documented, picture)?;
        println!("browser: wrote docs/{name}");
    }
    Ok(())
}

/// Returns the command that trains up to `steps`, resuming an existing run.
fn train(binary: &Path, run: &Path, steps: u64) -> Command {
    let mut command = Command::new(binary);
    command.arg("train").args(SETTINGS.split_whitespace());
    command.args(["--steps", &steps.to_string(), "--resume", "auto", "--out"]).arg(run);
    command.arg("--topology").arg(run.with_file_name("homes.toml"));
    command.current_dir(shell::root()).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Starts the page's server, and returns it with its address. With a ticket, it also asks the members.
fn watch(binary: &Path, run: &Path, ticket: Option<&Path>) -> Result<(Process, String)> {
    let mut command = Command::new(binary);
    command
        .arg("watch")
        .arg(run)
        .args(["--listen", "127.0.0.1:0"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if let Some(ticket) = ticket {
        command.arg("--ticket-file").arg(ticket);
    }
    let mut child = command.spawn().context("failed to start farflung watch")?;
    let mut line = String::new();
    let stdout = child.stdout.take().context("stdout is not piped")?;
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(
        line.starts_with("http://127.0.0.1:"),
        "farflung watch printed {line:?}, expected the page's address"
    );
    Ok((Process(child), line.trim().to_owned()))
}

/// Checks that the loss curve has one point per line of `metrics.jsonl`, for each choice of the horizontal
/// axis, and that the five members are drawn.
fn the_curve_is_the_file(browser: &mut Browser, run: &Path) -> Result<()> {
    let lines = BufReader::new(File::open(run.join("metrics.jsonl"))?).lines().count() as u64;
    ensure!(lines == STEPS, "metrics.jsonl has {lines} lines, expected {STEPS}");
    for axis in ["time", "bytes", "step"] {
        let drawn = format!(
            "new Promise(done => {{ document.querySelector('input[value={axis}]').click(); requestAnimationFrame(() => \
             requestAnimationFrame(() => {{ const curve = document.querySelector('#losspicture .raw'); \
             done(curve.getAttribute('d').match(/[ML]/g).length); }})); }})"
        );
        let drawn = browser.value(&drawn)?;
        ensure!(drawn == lines, "the curve over {axis} has {drawn} points, the file {lines} lines");
    }
    let drawn = browser.value("document.querySelectorAll('#members circle.node').length")?;
    ensure!(drawn == 5, "{drawn} members are drawn");
    println!("browser: the loss curve has {lines} points, as many as the file has lines");
    Ok(())
}

/// Checks that each picture has a description, and that each table has rows.
fn tables_open(browser: &mut Browser) -> Result<()> {
    let pictures = "[...document.querySelectorAll('svg')].every(svg => svg.getAttribute('role') === 'img' && \
        svg.getAttribute('aria-label').length > 20)";
    ensure!(browser.value(pictures)? == true, "a picture has no description");
    let open = "document.querySelectorAll('details').forEach(details => { details.open = true; }), true";
    browser.value(open)?;
    let rows = "[...document.querySelectorAll('details')].every(details => \
        details.querySelectorAll('tbody tr').length > 0)";
    browser.wait_for("all tables have rows", rows, PATIENCE)?;
    browser
        .value("document.querySelectorAll('details').forEach(details => { details.open = false; }), true")?;
    Ok(())
}

/// Checks that an event is shown when its line is complete, that its text is not treated as markup, and that an
/// invalid line is counted.
fn an_event_appears(browser: &mut Browser, run: &Path) -> Result<()> {
    let path = run.join("events.jsonl");
    let mut file = File::options().append(true).open(&path)?;
    let event = serde_json::json!({ "step": STEPS, "time_s": 1e6, "event": "lost", "peer": HOSTILE });
    // Write the line in two parts: half a line must not be shown.
    let line = format!("{event}\n");
    let (first, rest) = line.split_at(line.len() / 2);
    file.write_all(first.as_bytes())?;
    thread::sleep(Duration::from_millis(600));
    let newest = "document.querySelector('#events .said').textContent";
    ensure!(!browser.value(newest)?.as_str().unwrap_or_default().contains("lost"), "half a line is shown");
    file.write_all(rest.as_bytes())?;
    let expected = Value::String(format!("lost: {HOSTILE}"));
    browser.wait_for("an event appears", &format!("{newest}.startsWith({expected})"), PATIENCE)?;
    file.write_all(b"\xff not an event\n")?;
    let problem = "document.getElementById('problems').textContent.includes('events.jsonl: 1 line skipped')";
    browser.wait_for("the invalid line is counted", problem, PATIENCE)?;
    let taken = browser.value("document.querySelectorAll('img, #events script').length + document.title")?;
    if taken != "0homes · farflung" {
        bail!("text from a file was treated as markup: {taken}");
    }
    // Restore the file for the screenshots that follow.
    let text = fs::read(&path)?;
    let kept = text
        .windows(line.len())
        .position(|window| window == line.as_bytes())
        .context("events.jsonl no longer has the event")?;
    fs::write(&path, &text[..kept])?;
    browser.wait_for("the file is read again", "document.getElementById('problems').hidden", PATIENCE)?;
    println!("browser: an event appeared when its line was complete; its text was not treated as markup");
    Ok(())
}

/// Checks that the page is not wider than the screen, for wide and narrow screens and both colour schemes.
fn it_fits(browser: &mut Browser, folder: &Path) -> Result<()> {
    for (width, scheme) in [(1280, "light"), (1280, "dark"), (820, "light"), (390, "light"), (390, "dark")] {
        browser.look(width, 1.0, scheme)?;
        let wide = browser.value("document.documentElement.scrollWidth")?;
        ensure!(
            wide.as_u64().is_some_and(|wide| wide <= width.into()),
            "the page is {wide} pixels wide on a screen of {width}"
        );
        let path = folder.join(format!("{width}-{scheme}.png"));
        fs::write(path, browser.picture()?)?;
    }
    Ok(())
}
