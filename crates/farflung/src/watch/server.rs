//! Serves the state of a run over HTTP: the page at `/`, all data as JSON at `/snapshot`, and updates as
//! server-sent events at `/events`. It is read only.

use std::convert::Infallible;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State as Shared};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_core::Stream;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::curve::Point;
use super::folder::Folder;
use super::guard::{self, Refusal};
use super::snapshot::{Snapshot, Summary};
use crate::train::elastic::Status;
use crate::{Error, Result, Stop};

/// The page; `NONCE` in it is replaced in each answer.
const PAGE: &str = include_str!("page.html");
/// Time between two reads of the run's files.
const LOOK: Duration = Duration::from_millis(250);
/// Time between two questions to a member of the run.
const ASK: Duration = Duration::from_secs(2);
/// Highest number of browsers that follow at the same time.
const MOST_VIEWERS: usize = 32;

/// Asks a member of a run for its status.
pub type Ask = Box<dyn FnMut() -> Result<Option<Status>> + Send>;

/// The data that is served now.
#[derive(Debug)]
struct Published {
    snapshot: Snapshot,
    /// Time since a step was last written, at the time of publication.
    age: Option<Duration>,
    at: Instant,
}

#[expect(
    clippy::disallowed_methods,
    reason = "the page says how old its numbers are; nothing is computed from it"
)]
fn now() -> Instant {
    Instant::now()
}

impl Published {
    fn of(folder: &Folder) -> Arc<Self> {
        Arc::new(Self { snapshot: folder.state().snapshot(), age: folder.age(), at: now() })
    }

    /// Returns the seconds since a step was last written.
    fn age_s(&self) -> Option<f64> {
        self.age.map(|age| (age + self.at.elapsed()).as_secs_f64())
    }
}

/// State shared by all requests.
#[derive(Debug, Clone)]
struct AppState {
    published: watch::Receiver<Arc<Published>>,
    viewers: Arc<Semaphore>,
    /// The host of `--listen`.
    named: Arc<str>,
}

/// Serves a run's folder at an address until a signal. Calls `opened` with the address; calls `ask` repeatedly
/// to ask a member of the run for its status.
///
/// Errors: [`Error::Io`] for a folder that cannot be read or an address that cannot be bound;
/// [`Error::Setting`] for a folder that is not a run's.
pub fn serve(
    run: &Path,
    listen: &str,
    ask: Option<Ask>,
    stop: &Stop,
    opened: impl FnOnce(SocketAddr) -> Result<()>,
) -> Result<()> {
    let mut folder = Folder::open(run)?;
    folder.look();
    let (tell, published) = watch::channel(Published::of(&folder));
    let failed = || Error::io("listen at", Path::new(listen));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed())?;
    let listener = runtime.block_on(TcpListener::bind(listen)).map_err(failed())?;
    let address = listener.local_addr().map_err(failed())?;
    let named = listen.rsplit_once(':').map_or(listen, |(host, _)| host).trim_matches(['[', ']']);
    let site = AppState { published, viewers: Arc::new(Semaphore::new(MOST_VIEWERS)), named: named.into() };
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let answers = ask.map(|ask| {
            let (answer, answers) = channel();
            // Outside of the scope, so that the process does not wait for a question in progress.
            thread::spawn(move || keep_asking(ask, &answer));
            answers
        });
        let ended = &ended;
        scope.spawn(move || follow(&mut folder, answers.as_ref(), &tell, ended));
        let served = opened(address);
        if served.is_ok() {
            runtime.block_on(async {
                let serving = tokio::spawn(axum::serve(listener, router(site)).into_future());
                while stop.requested().is_none() && !serving.is_finished() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
        }
        ended.store(true, Ordering::Relaxed);
        runtime.shutdown_background();
        served
    })
}

/// Reads the run's files and publishes changes, until `ended`.
fn follow(
    folder: &mut Folder,
    answers: Option<&Receiver<Result<Option<Status>, String>>>,
    tell: &watch::Sender<Arc<Published>>,
    ended: &AtomicBool,
) {
    let mut version = folder.state().version();
    while !ended.load(Ordering::Relaxed) {
        for answer in answers.into_iter().flat_map(Receiver::try_iter) {
            folder.state_mut().asked(answer);
        }
        let more = folder.look();
        if version != folder.state().version() {
            version = folder.state().version();
            tell.send_replace(Published::of(folder));
        }
        if !more {
            thread::sleep(LOOK);
        }
    }
}

/// Asks repeatedly until the receiver is dropped.
fn keep_asking(mut ask: Ask, answer: &Sender<Result<Option<Status>, String>>) {
    loop {
        let said = ask().map_err(|error| crate::events::causes(&error));
        if answer.send(said).is_err() {
            return;
        }
        thread::sleep(ASK);
    }
}

fn router(site: AppState) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/snapshot", get(snapshot))
        .route("/events", get(events))
        .layer(from_fn_with_state(site.clone(), guarded))
        .with_state(site)
}

/// Refuses the requests that are not answered, and sets security headers on all answers.
async fn guarded(Shared(site): Shared<AppState>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).map(HeaderValue::as_bytes);
    let mut response = match guard::check(request.method().as_str(), host, &site.named) {
        Ok(()) => next.run(request).await,
        Err(Refusal::Method) => {
            (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, "GET")], "this page is read only\n")
                .into_response()
        }
        Err(Refusal::NoHost) => (StatusCode::BAD_REQUEST, "a request needs a Host header\n").into_response(),
        Err(Refusal::OtherHost) => {
            let text = "the request's Host is not this server: use its address, or the name that was given \
                        to --listen\n";
            (StatusCode::MISDIRECTED_REQUEST, text).into_response()
        }
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers
        .entry(header::CONTENT_SECURITY_POLICY)
        .or_insert(HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'"));
    response
}

/// Returns an unpredictable word for the page's own script and style: the keys of a [`RandomState`] are random
/// numbers of the system.
fn nonce() -> String {
    static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let [a, b] = [0, 1].map(|i| KEYS[i].hash_one(count));
    format!("{a:016x}{b:016x}")
}

async fn page() -> Response {
    let nonce = nonce();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let page = PAGE.replace("NONCE", &nonce);
    let html = "text/html; charset=utf-8".to_owned();
    ([(header::CONTENT_TYPE, html), (header::CONTENT_SECURITY_POLICY, policy)], page).into_response()
}

async fn snapshot(Shared(site): Shared<AppState>) -> Response {
    #[derive(Serialize)]
    struct Body<'a> {
        #[serde(flatten)]
        snapshot: &'a Snapshot,
        age_s: Option<f64>,
    }
    let published = site.published.borrow().clone();
    let body = Body { snapshot: &published.snapshot, age_s: published.age_s() };
    ([(header::CONTENT_TYPE, "application/json")], json(&body)).into_response()
}

fn json(body: &impl Serialize) -> String {
    serde_json::to_string(body).expect("numbers and texts can be written as JSON")
}

/// Data that is new for a viewer.
#[derive(Serialize)]
struct Update<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    curve: CurvePart<'a>,
    age_s: Option<f64>,
}

/// The points of a curve from an index on; earlier points are unchanged.
#[derive(Serialize)]
struct CurvePart<'a> {
    generation: u64,
    from: usize,
    points: &'a [Point],
}

async fn events(Shared(site): Shared<AppState>) -> Response {
    let Ok(place) = site.viewers.clone().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many browsers show this run\n").into_response();
    };
    let viewer = Viewer { published: site.published.clone(), known: None, _place: place };
    Sse::new(Updates::of(viewer))
        .keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
        .into_response()
}

/// A browser that follows, and the position up to which it has received data.
struct Viewer {
    published: watch::Receiver<Arc<Published>>,
    /// The generation of the curve, and the number of points received.
    known: Option<(u64, usize)>,
    _place: OwnedSemaphorePermit,
}

impl Viewer {
    /// Returns the next update as soon as there is one; the first one at once.
    async fn next(mut self) -> Option<(Event, Self)> {
        if self.known.is_some() {
            self.published.changed().await.ok()?;
        }
        let published = self.published.borrow_and_update().clone();
        let Snapshot { summary, curve } = &published.snapshot;
        let (from, points) =
            self.known.map_or((0, &curve.points[..]), |(generation, count)| curve.since(generation, count));
        let part = CurvePart { generation: curve.generation, from, points };
        let update = json(&Update { summary, curve: part, age_s: published.age_s() });
        self.known = Some((curve.generation, curve.points.len()));
        Some((Event::default().event("update").data(update), self))
    }
}

type NextUpdate = Pin<Box<dyn Future<Output = Option<(Event, Viewer)>> + Send>>;

/// The stream of updates for a viewer.
struct Updates(NextUpdate);

impl Updates {
    fn of(viewer: Viewer) -> Self {
        Self(Box::pin(viewer.next()))
    }
}

impl Stream for Updates {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.0.as_mut().poll(context));
        Poll::Ready(next.map(|(event, viewer)| {
            *self = Self::of(viewer);
            Ok(event)
        }))
    }
}
