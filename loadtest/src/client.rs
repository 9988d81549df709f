//! One request, from its intended start to its outcome.
//!
//! The client hides nothing: it does not retry an answer and does not follow redirects. The one exception is hyper's
//! own and harmless: a request for which a kept-alive connection turns out to be closed *before a byte was sent* takes
//! another connection, as every HTTP client does.
//!
//! A request's clock ends when the last byte of the answer is here. Checking the answer comes after, so that our own
//! parsing is not counted as their latency.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Http;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use regions::RegionId;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use tokio::time::timeout_at;

use crate::answer::{self, Rubbish};
use crate::options::Options;
use crate::pace::IntendedStart;
use crate::texts::Texts;

/// How much of one answer is read: 2048 rows of 4096 numbers with 12 digits each, and a little.
pub const ANSWER_BYTES_MAX: usize = 128 << 20;

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// As many requests as may be were in flight already.
    NotSent,
    /// No connection came about.
    Unreachable,
    /// The connection ended before the answer did.
    BrokenOff,
    /// There was no whole answer in time.
    Timeout,
    /// The server said no.
    Refused {
        /// Its status.
        status: u16,
        /// Its code, where it is Meridian's.
        code: Option<ErrorCode>,
    },
    /// The server said yes, with something that is not an answer.
    Rubbish(Rubbish),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::NotSent => f.write_str("not sent: too many in flight"),
            Failure::Unreachable => f.write_str("no connection"),
            Failure::BrokenOff => f.write_str("connection broken off"),
            Failure::Timeout => f.write_str("no answer in time"),
            Failure::Refused { status, code: Some(code) } => write!(f, "{status} {}", code.as_str()),
            Failure::Refused { status, code: None } => write!(f, "{status}"),
            Failure::Rubbish(what) => write!(f, "rubbish: {what}"),
        }
    }
}

/// How one request went.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When it should have started, since the start of the run.
    pub intended: Duration,
    /// How much later than that the generator really started it.
    pub lag: Duration,
    /// From the intended start to the last byte of the answer, or to the failure; none if it was never sent.
    pub latency: Option<Duration>,
    /// The region that answered, where the answer names one.
    pub region: Option<RegionId>,
    /// Whether the gateway had to ask more than once.
    pub retried: bool,
    /// Success, or why not.
    pub outcome: Result<(), Failure>,
}

/// Sends requests; one for the whole run.
pub struct Client {
    http: Http<HttpConnector, Full<Bytes>>,
    target: Uri,
    headers: HeaderMap,
    /// `{"model":"…","encoding_format":"float","input":[`
    body_head: Vec<u8>,
    inputs: usize,
    texts: Texts,
    timeout: Duration,
    /// The length of the rows of this run, once the first answer has said it; 0 before.
    dimensions: AtomicUsize,
}

impl Sample {
    /// The request of `intended`, which found at `now` that [`Options::in_flight_max`] others were in flight.
    pub fn not_sent(intended: IntendedStart, now: Instant) -> Sample {
        Sample {
            intended: intended.offset,
            lag: now.saturating_duration_since(intended.at),
            latency: None,
            region: None,
            retried: false,
            outcome: Err(Failure::NotSent),
        }
    }
}

impl Client {
    /// The client of a run.
    pub fn new(options: &Options) -> Client {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = Http::builder(TokioExecutor::new())
            .pool_max_idle_per_host(options.in_flight_max)
            .pool_timer(TokioTimer::new())
            .build(connector);
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(authorization) = &options.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        if let Some(geo) = options.geo {
            let geo = format!("{},{}", geo.lat(), geo.lon());
            headers.insert(
                headers::CLIENT_GEO,
                geo.try_into().expect("two numbers and a comma are a header value"),
            );
        }
        let model = serde_json::Value::from(options.model.as_str());
        Client {
            http,
            target: options.target.clone(),
            headers,
            body_head: format!(r#"{{"model":{model},"encoding_format":"float","input":["#).into_bytes(),
            inputs: options.inputs,
            texts: options.texts.clone(),
            timeout: options.timeout,
            dimensions: AtomicUsize::new(0),
        }
    }

    /// Sends the request that `intended` calls for, and waits for how it goes.
    pub async fn send(&self, intended: IntendedStart) -> Sample {
        let request = self.request(intended.number);
        let deadline = (intended.at + self.timeout).into();
        let started = Instant::now();
        let mut sample = Sample {
            intended: intended.offset,
            lag: started.saturating_duration_since(intended.at),
            latency: None,
            region: None,
            retried: false,
            outcome: Err(Failure::Timeout),
        };

        let head = timeout_at(deadline, self.http.request(request)).await;
        let answer = match head {
            Err(_) => Err(Failure::Timeout),
            Ok(Err(error)) if error.is_connect() => Err(Failure::Unreachable),
            Ok(Err(_)) => Err(Failure::BrokenOff),
            Ok(Ok(response)) => {
                sample.region = header(response.headers(), headers::REGION);
                sample.retried = header::<u32>(response.headers(), headers::ATTEMPTS).is_some_and(|n| n > 1);
                match timeout_at(deadline, read(response)).await {
                    Err(_) => Err(Failure::Timeout),
                    Ok(answer) => answer,
                }
            }
        };
        sample.latency = Some(intended.at.elapsed());
        sample.outcome = answer.and_then(|body| self.check(&body));
        sample
    }

    /// The addresses of the target, for a first look at whether anybody listens there.
    pub(crate) async fn addresses(&self) -> std::io::Result<Vec<SocketAddr>> {
        let host = self.target.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = self.target.port_u16().unwrap_or(80);
        Ok(tokio::net::lookup_host((host, port)).await?.collect())
    }

    fn request(&self, number: u64) -> Request<Full<Bytes>> {
        let mut body = self.body_head.clone();
        for (place, text) in self.texts.of_request(number, self.inputs).enumerate() {
            if place > 0 {
                body.push(b',');
            }
            body.extend_from_slice(text.as_bytes());
        }
        body.extend_from_slice(b"]}");
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.target.clone();
        *request.headers_mut() = self.headers.clone();
        request
    }

    /// Whether `body` answers a request of this run.
    fn check(&self, body: &[u8]) -> Result<(), Failure> {
        let dimensions = answer::check(body, self.inputs).map_err(Failure::Rubbish)?;
        match self.dimensions.compare_exchange(0, dimensions, Ordering::Relaxed, Ordering::Relaxed) {
            Err(earlier) if earlier != dimensions => Err(Failure::Rubbish(Rubbish::WrongDimensions)),
            _ => Ok(()),
        }
    }
}

/// The whole body of a success; a refusal is read too, so that its connection can be used again.
async fn read(response: Response<Incoming>) -> Result<Bytes, Failure> {
    let status = response.status().as_u16();
    let code = response.headers().get(headers::ERROR).and_then(|code| ErrorCode::parse(code.to_str().ok()?));
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    if status != 200 {
        return Err(Failure::Refused { status, code });
    }
    match body {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Failure::Rubbish(Rubbish::TooLarge)),
        Err(_) => Err(Failure::BrokenOff),
    }
}

fn header<T: std::str::FromStr>(headers: &HeaderMap, name: &str) -> Option<T> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}
