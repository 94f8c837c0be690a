//! Exports traces with OpenTelemetry's protocol (OTLP over HTTP, protobuf): the spans that the crates make with
//! `tracing`. A step contains collectives, and these contain their waits, each with the peer that was waited
//! for.

use std::future::Future;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::pin::Pin;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider};
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;

use crate::{Error, Result};

/// Path of the traces at a collector.
const PATH: &str = "/v1/traces";
/// Default port of collectors.
const PORT: u16 = 4318;
/// Time limit of an exchange with a collector, and of sending the last spans at the end of the process.
const PATIENCE: Duration = Duration::from_secs(5);
/// Number of spans that may wait to be sent; further ones are dropped.
const QUEUE: usize = 65_536;
/// Number of bytes read of an answer.
const ANSWER: u64 = 64 * 1024;

/// Sends spans until [`end`](Traces::end) is called.
#[derive(Debug)]
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Returns traces that are sent to the collector at this address: `http://HOST:PORT`, with or without a
    /// path.
    ///
    /// Errors: [`Error::Setting`] for an invalid address.
    pub fn to(url: &str) -> Result<Self> {
        let expected = |expected: &str| Error::Setting {
            field: "otlp",
            value: url.to_owned(),
            expected: expected.to_owned(),
        };
        if url.starts_with("https:") {
            return Err(expected("http://: run a collector on this machine that forwards to https"));
        }
        let collector = Collector::at(url).ok_or_else(|| expected("http://HOST:PORT"))?;
        let endpoint = format!("http://{}{}", collector.authority, collector.path);
        let exporter =
            SpanExporter::builder().with_http().with_http_client(collector).with_endpoint(endpoint);
        let exporter =
            exporter.with_timeout(PATIENCE).build().map_err(|error| expected(&error.to_string()))?;
        let config = BatchConfigBuilder::default()
            .with_max_queue_size(QUEUE)
            .with_scheduled_delay(Duration::from_secs(1))
            .build();
        let batches = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let resource = Resource::builder_empty()
            .with_service_name("farflung")
            .with_attributes([
                KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
                KeyValue::new("host.name", host),
                KeyValue::new("process.pid", i64::from(std::process::id())),
            ])
            .build();
        Ok(Self(SdkTracerProvider::builder().with_span_processor(batches).with_resource(resource).build()))
    }

    /// Returns the layer of a subscriber that receives this project's spans, even if the log does not show
    /// them.
    #[must_use]
    pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        let own = Targets::new().with_target("farflung", LevelFilter::DEBUG);
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer("farflung"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(own)
    }

    /// Sends the remaining spans.
    pub fn end(&self) {
        if let Err(error) = self.0.shutdown_with_timeout(PATIENCE) {
            tracing::warn!(%error, "the last traces were not sent");
        }
    }
}

/// A collector without encryption; each batch uses a new connection.
#[derive(Debug, Clone)]
struct Collector {
    /// Host and port.
    authority: String,
    path: String,
}

impl Collector {
    fn at(url: &str) -> Option<Self> {
        let rest = url.strip_prefix("http://")?;
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let is_whole = authority.parse::<std::net::Ipv6Addr>().is_err() && !authority.ends_with(']');
        let has_port = is_whole && authority.contains(':');
        if host.is_empty() || authority.contains('@') || authority.bytes().any(|b| b <= b' ' || b == 0x7f) {
            return None;
        }
        let authority = if has_port { authority.to_owned() } else { format!("{authority}:{PORT}") };
        let port_is_one = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let path = if path.is_empty() || path == "/" { PATH } else { path }.to_owned();
        port_is_one.then_some(Self { authority, path })
    }

    fn post(&self, request: &Request<Bytes>) -> io::Result<Response<Bytes>> {
        let address = self.authority.to_socket_addrs()?.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let Self { authority, path } = self;
        let length = request.body().len();
        let mut head = format!("POST {path} HTTP/1.1\r\nhost: {authority}\r\ncontent-length: {length}\r\n");
        for (name, value) in request.headers() {
            if let (Ok(value), false) = (value.to_str(), name == "host" || name == "content-length") {
                head.extend([name.as_str(), ": ", value, "\r\n"]);
            }
        }
        head += "connection: close\r\n\r\n";
        stream.write_all(head.as_bytes())?;
        stream.write_all(request.body())?;
        let mut answer = Vec::new();
        stream.take(ANSWER).read_to_end(&mut answer)?;
        let status =
            status_of(&answer).ok_or_else(|| io::Error::other("the collector's answer is not HTTP"))?;
        // Only the status of the answer is used: a batch that was accepted in part is not sent again.
        Response::builder().status(status).body(Bytes::new()).map_err(io::Error::other)
    }
}

/// Returns the status of an HTTP answer.
fn status_of(answer: &[u8]) -> Option<u16> {
    let line = answer.split(|&byte| byte == b'\r').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split(' ');
    words.next().filter(|version| version.starts_with("HTTP/1."))?;
    words.next()?.parse().ok()
}

impl HttpClient for Collector {
    // The signature that `async_trait` makes of the trait's method.
    fn send_bytes<'life0, 'async_trait>(
        &'life0 self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = std::result::Result<Response<Bytes>, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        // Blocking is allowed, since the exporter runs on its own thread.
        Box::pin(async move { self.post(&request).map_err(HttpError::from) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_collectors_are_read_and_others_refused() {
        let at = |url: &str| Collector::at(url).map(|c| format!("{}{}", c.authority, c.path));
        for (url, whole) in [
            ("http://127.0.0.1:4318", "127.0.0.1:4318/v1/traces"),
            ("http://box", "box:4318/v1/traces"),
            ("http://box/", "box:4318/v1/traces"),
            ("http://[::1]", "[::1]:4318/v1/traces"),
            ("http://[::1]:9/own", "[::1]:9/own"),
            ("http://box:80/a/b", "box:80/a/b"),
        ] {
            assert_eq!(at(url).as_deref(), Some(whole));
        }
        for url in ["", "box:4318", "http://", "http://:1", "http://a:b", "http://a:99999", "http://a b:1"] {
            assert!(Traces::to(url).unwrap_err().to_string().contains("http://HOST:PORT"), "{url}");
        }
        assert!(Traces::to("https://box:4318").unwrap_err().to_string().contains("run a collector on"));
    }

    #[test]
    fn the_status_of_an_answer_is_its_second_word() {
        assert_eq!(status_of(b"HTTP/1.1 200 OK\r\n\r\n"), Some(200));
        assert_eq!(status_of(b"HTTP/1.0 503 Busy\r\nx: y"), Some(503));
        for bad in [&b""[..], b"SSH-2.0-x\r\n", b"HTTP/1.1\r\n", b"HTTP/1.1 abc\r\n", b"\xff 200\r\n"] {
            assert_eq!(status_of(bad), None);
        }
    }
}
