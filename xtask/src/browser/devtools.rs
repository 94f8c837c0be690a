//! Controls a headless Chromium through its `DevTools` protocol over two pipes. Messages are JSON, each
//! followed by a zero byte.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::shell;

/// Timeout for an answer of the browser.
const PATIENCE: Duration = Duration::from_secs(30);

/// Events of the page that are recorded for later checks.
#[derive(Debug, Default)]
pub(crate) struct PageEvents {
    /// Errors and warnings of the console, and errors of scripts and of the content security policy.
    pub(crate) errors: Vec<String>,
    /// URLs that the page requested.
    pub(crate) requests: Vec<String>,
}

/// A running browser with one page.
#[derive(Debug)]
pub(crate) struct Browser {
    process: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    next: u64,
    session: Option<String>,
    pub(crate) heard: PageEvents,
}

impl Browser {
    /// Starts Chromium with a new profile in `folder`.
    pub(crate) fn start(folder: &Path) -> Result<Self> {
        // The protocol uses the file descriptors 3 and 4. Only a shell can set them without `unsafe`.
        let script = "exec chromium --headless=new --remote-debugging-pipe --no-sandbox --disable-gpu \
            --disable-dev-shm-usage --no-first-run --disable-background-networking --disable-component-update \
            --hide-scrollbars --disable-lcd-text --force-color-profile=srgb --user-data-dir=\"$0\" about:blank \
            3<&0 4>&1 </dev/null >/dev/null 2>\"$0.log\"";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(folder.join("profile")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().context("failed to start Chromium")?;
        let to = process.stdin.take().context("stdin is not piped")?;
        let answers = process.stdout.take().context("stdout is not piped")?;
        let (told, from) = channel();
        thread::spawn(move || {
            for message in BufReader::new(answers).split(0).map_while(Result::ok) {
                if let Ok(message) = serde_json::from_slice(&message)
                    && told.send(message).is_err()
                {
                    return;
                }
            }
        });
        let mut browser = Self { process, to, from, next: 0, session: None, heard: PageEvents::default() };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", &attach)?;
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method of the protocol and returns its result.
    pub(crate) fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        self.to.write_all(&bytes).and_then(|()| self.to.flush()).context("Chromium has ended")?;
        loop {
            let answer = self.from.recv_timeout(PATIENCE);
            let answer = answer.with_context(|| format!("Chromium does not answer {method}"))?;
            if answer["id"] == self.next {
                if let Some(error) = answer.get("error") {
                    bail!("{method} failed: {error}");
                }
                return Ok(answer["result"].clone());
            }
            self.heard.take(&answer);
        }
    }

    /// Evaluates an expression in the page and returns its value.
    pub(crate) fn value(&mut self, expression: &str) -> Result<Value> {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", &params)?;
        if let Some(thrown) = answer.get("exceptionDetails") {
            bail!("`{expression}` throws: {thrown}");
        }
        Ok(answer["result"]["value"].clone())
    }

    /// Waits until an expression in the page is true. `what` describes the condition in the error.
    pub(crate) fn wait_for(&mut self, what: &str, expression: &str, patience: Duration) -> Result<()> {
        let pause = Duration::from_millis(50);
        for _ in 0..patience.as_millis() / pause.as_millis() {
            if self.value(expression)? == Value::Bool(true) {
                return Ok(());
            }
            thread::sleep(pause);
        }
        bail!("timed out waiting until {what}: `{expression}`")
    }

    /// Sets the page's width, the number of device pixels per CSS pixel, and the colour scheme (`light` or
    /// `dark`).
    pub(crate) fn look(&mut self, width: u32, scale: f64, scheme: &str) -> Result<()> {
        let size = json!({ "width": width, "height": 900, "deviceScaleFactor": scale, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &size)?;
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", &scheme)?;
        // Wait for two frames and 150 ms: the page is redrawn in the first frame.
        let frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => \
            setTimeout(() => done(true), 150))))";
        self.value(frames).map(|_| ())
    }

    /// Takes a screenshot of the whole page, as a PNG.
    pub(crate) fn picture(&mut self) -> Result<Vec<u8>> {
        let params = json!({ "format": "png", "captureBeyondViewport": true, "optimizeForSpeed": false });
        let answer = self.call("Page.captureScreenshot", &params)?;
        from_base64(answer["data"].as_str().context("the answer has no picture")?)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Chromium would exit when its pipe closes, but a hanging page could delay that.
        let _ = shell::succeeds(&mut shell::command("kill", &[self.process.id().to_string()]));
        let _ = self.process.wait();
    }
}

impl PageEvents {
    fn take(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown" => self.errors.push(params["exceptionDetails"].to_string()),
            "Runtime.consoleAPICalled"
                if ["error", "warning", "assert"].contains(&params["type"].as_str().unwrap_or("")) =>
            {
                self.errors.push(params["args"].to_string());
            }
            "Log.entryAdded" if params["entry"]["level"] == "error" => {
                self.errors.push(params["entry"].to_string());
            }
            "Network.requestWillBeSent" => {
                self.requests.extend(params["request"]["url"].as_str().map(str::to_owned));
            }
            _ => {}
        }
    }
}

/// Decodes base64 (RFC 4648, section 4).
fn from_base64(text: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for byte in text.trim_end_matches('=').bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => bail!("not base64: {}", char::from(byte)),
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (text, bytes) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYg==", "foob"),
            ("Zm9vYmFy", "foobar"),
        ] {
            assert_eq!(from_base64(text).unwrap(), bytes.as_bytes());
        }
        assert_eq!(from_base64("+/+/").unwrap(), [0xFB, 0xFF, 0xBF]);
        assert!(from_base64("Zm9v!").is_err());
    }

    #[test]
    fn errors_and_requests_of_a_page_are_heard() {
        let mut heard = PageEvents::default();
        for message in [
            json!({ "method": "Runtime.exceptionThrown", "params": { "exceptionDetails": { "text": "a" } } }),
            json!({ "method": "Runtime.consoleAPICalled", "params": { "type": "error", "args": [1] } }),
            json!({ "method": "Runtime.consoleAPICalled", "params": { "type": "log", "args": [1] } }),
            json!({ "method": "Log.entryAdded", "params": { "entry": { "level": "error", "text": "csp" } } }),
            json!({ "method": "Log.entryAdded", "params": { "entry": { "level": "info" } } }),
            json!({ "method": "Network.requestWillBeSent", "params": { "request": { "url": "http://a/" } } }),
            json!({}),
        ] {
            heard.take(&message);
        }
        assert_eq!((heard.errors.len(), &heard.requests[..]), (3, &["http://a/".to_owned()][..]));
    }
}
