//! Serves a process's metrics for Prometheus, as text over HTTP, read only.

use std::future::IntoFuture as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::thread;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{CounterVec, Encoder as _, GaugeVec, Opts, Registry, TextEncoder};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::Observer;
use crate::train::Observation;
use crate::{Error, Result, StepMetrics};

/// The metrics, and the thread that serves them until this is dropped.
#[derive(Debug)]
pub struct Served {
    numbers: Numbers,
    address: SocketAddr,
    end: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Numbers {
    registry: Registry,
    /// The rank of the last observation, as a label; 0 before the first one.
    rank: String,
    gauges: GaugeVec,
    seconds: CounterVec,
    tokens: CounterVec,
    bytes: CounterVec,
    peer_bytes: CounterVec,
    round_trips: GaugeVec,
    packets: CounterVec,
    queued: GaugeVec,
    queued_seconds: CounterVec,
    calls: CounterVec,
    failed: CounterVec,
    operation_seconds: CounterVec,
    operation_bytes: CounterVec,
    waits: CounterVec,
}

impl Numbers {
    fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<CounterVec> {
            let counter = CounterVec::new(Opts::new(name, help).namespace("farflung"), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let gauge = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<GaugeVec> {
            let gauge = GaugeVec::new(Opts::new(name, help).namespace("farflung"), labels)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let numbers = Self {
            gauges: gauge(
                "now",
                "Values after the last step: step, train_loss, val_loss, learning_rate, tokens_per_second.",
                &["rank", "what"],
            )?,
            seconds: counter(
                "step_seconds_total",
                "Seconds of the run's clock in steps: compute, wait for stages, communicate.",
                &["rank", "part"],
            )?,
            tokens: counter("tokens_total", "Tokens that all ranks trained on.", &["rank"])?,
            bytes: counter(
                "bytes_total",
                "Bytes sent and received since the run's first step.",
                &["rank", "way"],
            )?,
            peer_bytes: counter(
                "peer_bytes_total",
                "Bytes sent to and received from a peer since it connected.",
                &["rank", "peer", "way"],
            )?,
            round_trips: gauge(
                "peer_round_trip_seconds",
                "Round-trip time to a peer: smoothed, and the least one.",
                &["rank", "peer", "which"],
            )?,
            packets: counter(
                "peer_packets_total",
                "Packets with data that were sent to a peer: all, and retransmitted ones.",
                &["rank", "peer", "which"],
            )?,
            queued: gauge("peer_queued_bytes", "Bytes that are queued here for a peer.", &["rank", "peer"])?,
            queued_seconds: counter(
                "peer_queued_seconds_total",
                "Seconds for which frames to a peer were queued in the process.",
                &["rank", "peer"],
            )?,
            calls: counter("operations_total", "Operations that ended.", &["rank", "op", "algorithm"])?,
            failed: counter(
                "operations_failed_total",
                "Operations that failed.",
                &["rank", "op", "algorithm"],
            )?,
            operation_seconds: counter(
                "operation_seconds_total",
                "Seconds from start to end, all operations together.",
                &["rank", "op", "algorithm"],
            )?,
            operation_bytes: counter(
                "operation_bytes_total",
                "Payloads that operations sent and received.",
                &["rank", "op", "algorithm", "way"],
            )?,
            waits: counter(
                "operation_wait_seconds_total",
                "Seconds for which operations waited, by the peer that they waited for.",
                &["rank", "op", "algorithm", "peer"],
            )?,
            registry: registry.clone(),
            rank: "0".to_owned(),
        };
        Ok(numbers)
    }

    fn observe(&mut self, seen: &Observation<'_>) {
        let times = seen.times;
        let rank = times.rank.to_string();
        self.rank.clone_from(&rank);
        let now = |what: &str, value: f64| self.gauges.with_label_values(&[&rank, what]).set(value);
        now("step", times.step as f64);
        now("learning_rate", seen.lr);
        now("tokens_per_second", seen.tokens_per_s);
        let parts =
            [("compute", times.compute_s()), ("wait", times.wait_s), ("communicate", times.communicate_s)];
        for (part, seconds) in parts {
            self.seconds.with_label_values(&[&rank[..], part]).inc_by(seconds.max(0.0));
        }
        raise(&self.tokens, &[&rank], seen.tokens as f64);
        raise(&self.bytes, &[&rank, "sent"], times.bytes_sent as f64);
        raise(&self.bytes, &[&rank, "received"], seen.bytes_received as f64);
        for counters in seen.peers {
            let peer = counters.peer.to_string();
            raise(&self.peer_bytes, &[&rank, &peer, "sent"], counters.bytes_sent as f64);
            raise(&self.peer_bytes, &[&rank, &peer, "received"], counters.bytes_received as f64);
            let Some(path) = counters.path else { continue };
            for (which, seconds) in [("smoothed", path.round_trip_s), ("least", path.least_round_trip_s)] {
                let gauge = || self.round_trips.with_label_values(&[&rank, &peer, which]);
                if let Some(seconds) = seconds {
                    gauge().set(seconds);
                }
            }
            raise(&self.packets, &[&rank, &peer, "all"], path.packets as f64);
            raise(&self.packets, &[&rank, &peer, "again"], path.retransmissions as f64);
            self.queued.with_label_values(&[&rank, &peer]).set(path.queued_bytes as f64);
            raise(&self.queued_seconds, &[&rank, &peer], path.queued_s);
        }
        for (op, algorithm, counter) in seen.operations {
            let algorithm = algorithm.map_or_else(String::new, |algorithm| algorithm.to_string());
            raise(&self.calls, &[&rank, op, &algorithm], counter.calls as f64);
            raise(&self.failed, &[&rank, op, &algorithm], counter.failed as f64);
            raise(&self.operation_seconds, &[&rank, op, &algorithm], counter.took.as_secs_f64());
            raise(&self.operation_bytes, &[&rank, op, &algorithm, "sent"], counter.sent.0 as f64);
            raise(&self.operation_bytes, &[&rank, op, &algorithm, "received"], counter.received.0 as f64);
            for (peer, waited) in &counter.waited {
                let peer = peer.0.to_string();
                raise(&self.waits, &[&rank, op, &algorithm, &peer], waited.as_secs_f64());
            }
        }
    }

    fn record_row(&self, row: &StepMetrics) {
        // A row has losses of the whole run, but each member of `farflung host` writes one, so it is labelled
        // with the rank that wrote it.
        let now = |what: &str, value: f64| self.gauges.with_label_values(&[&self.rank[..], what]).set(value);
        now("train_loss", row.train_loss);
        row.val_loss.into_iter().for_each(|loss| now("val_loss", loss));
    }
}

/// Raises a counter to a total. A lower total means that members have changed; the counter is then reset first.
fn raise(counter: &CounterVec, labels: &[&str], total: f64) {
    let counter = counter.with_label_values(labels);
    if total < counter.get() {
        counter.reset();
    }
    counter.inc_by((total - counter.get()).max(0.0));
}

/// State for answering requests.
#[derive(Debug, Clone)]
struct Site {
    registry: Registry,
    /// Whether only requests that name this machine are answered.
    is_loopback: bool,
}

impl Served {
    /// Serves at an address: `HOST:PORT`, or a port of the loopback. `local_rank` is added to any port other
    /// than 0.
    ///
    /// Errors: [`Error::Setting`] for an invalid address; [`Error::Io`] if it cannot be bound.
    pub fn start(address: &str, local_rank: usize) -> Result<Self> {
        let expected = || Error::Setting {
            field: "prometheus",
            value: address.to_owned(),
            expected: "HOST:PORT, or a port of the loopback".to_owned(),
        };
        let (host, port) = address.rsplit_once(':').unwrap_or(("127.0.0.1", address));
        let port: u16 = port.parse().map_err(|_| expected())?;
        let local_rank = if port == 0 { 0 } else { u16::try_from(local_rank).map_err(|_| expected())? };
        let port = port.checked_add(local_rank).ok_or_else(expected)?;
        let at = format!("{host}:{port}");
        let failed = || Error::io("listen at", Path::new(&at));
        let numbers = Numbers::new().map_err(|error| failed()(std::io::Error::other(error)))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed())?;
        let listener = runtime.block_on(TcpListener::bind(&at)).map_err(failed())?;
        let address = listener.local_addr().map_err(failed())?;
        let site = Site { registry: numbers.registry.clone(), is_loopback: address.ip().is_loopback() };
        let router = Router::new().route("/metrics", get(answer)).with_state(site);
        let (end, ended) = oneshot::channel::<()>();
        let serve = move || {
            runtime.block_on(async move {
                let serving = tokio::spawn(axum::serve(listener, router).into_future());
                // An error means that the owner was dropped, which is the signal to end.
                let _ = ended.await;
                serving.abort();
            });
        };
        let named = thread::Builder::new().name("farflung-prometheus".to_owned());
        let thread = named.spawn(serve).map_err(failed())?;
        Ok(Self { numbers, address, end: Some(end), thread: Some(thread) })
    }

    /// Returns the address at which it serves.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported already.
            let _ = thread.join();
        }
    }
}

impl Observer for Served {
    fn step_row(&mut self, row: &StepMetrics) {
        self.numbers.record_row(row);
    }
    fn observe(&mut self, seen: &Observation<'_>) {
        self.numbers.observe(seen);
    }
}

/// Returns whether a request's `Host` is `localhost` or an IP address. A page of another site can make its own
/// name resolve to this machine (DNS rebinding); its requests have that name as `Host`.
fn names_this_machine(host: Option<&[u8]>) -> bool {
    let Some(host) = host.and_then(|host| Authority::try_from(host).ok()) else { return false };
    let host = host.host().trim_matches(['[', ']']);
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok()
}

async fn answer(State(site): State<Site>, request: Request) -> Response {
    let host = request.headers().get(header::HOST).map(axum::http::HeaderValue::as_bytes);
    if site.is_loopback && !names_this_machine(host) {
        return (StatusCode::FORBIDDEN, "the request's Host is not a name of this machine\n").into_response();
    }
    let mut text = Vec::new();
    let encoder = TextEncoder::new();
    match encoder.encode(&site.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, encoder.format_type().to_owned())], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepTimes;

    #[test]
    fn losses_have_the_rank_that_wrote_them() {
        let mut numbers = Numbers::new().unwrap();
        let times = StepTimes { rank: 2, ..StepTimes::default() };
        numbers.observe(&Observation {
            times: &times,
            bytes_received: 0,
            tokens: 0,
            tokens_per_s: 0.0,
            lr: 0.0,
            peers: &[],
            operations: &[],
        });
        numbers.record_row(&StepMetrics { train_loss: 2.5, ..StepMetrics::default() });
        let mut text = Vec::new();
        TextEncoder::new().encode(&numbers.registry.gather(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("farflung_now{rank=\"2\",what=\"train_loss\"} 2.5"), "{text}");
        assert!(!text.contains("rank=\"0\""), "{text}");
    }
}
