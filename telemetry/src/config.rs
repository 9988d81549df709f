//! Configuration of traces: the section `[tracing]`, and the standard variables of OpenTelemetry.
//!
//! A key of the file takes precedence over its variable. Without an endpoint in either, no trace is recorded.
//!
//! The exporter reads `OTEL_EXPORTER_OTLP_HEADERS` itself, so that secrets pass through no other code; here they are only
//! checked.

use configuration::{ConfigFile, Files, section, words};
use http::Uri;
use identity::authorities::read_roots;
use percent_encoding::percent_decode_str;
use rustls::RootCertStore;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use telemetry_core::sampling::{HeadSampler, KeepPolicy};

/// Share of the traces that is sampled by default: the usual one for services with thousands of requests a second.
const SAMPLE_RATIO: f64 = 0.01;
/// Duration from which a request is slow by default.
const SLOW: Duration = Duration::from_secs(1);
/// Limit of kept traces in a second by default: some 500 spans, of which the queue has sixteen times as many.
const KEPT_PER_SECOND: u32 = 100;
/// Timeout of an export by default, as OpenTelemetry specifies.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of headers of an export, and of attributes of the process.
const PAIRS_MAX: usize = 64;
/// Path of traces at a collector.
const HTTP_PATH: &str = "/v1/traces";

words! {
    /// Protocol of exports.
    pub enum ExportProtocol {
        /// gRPC.
        Grpc = "grpc",
        /// HTTP with protobuf bodies.
        Http = "http/protobuf",
    }
}

words! {
    /// Sampler, with the names of OpenTelemetry.
    pub enum SamplerName {
        /// All traces.
        AlwaysOn = "always_on",
        /// None but errors, failovers and slow requests.
        AlwaysOff = "always_off",
        /// A share of the traces; the flag of a caller is ignored.
        Ratio = "traceidratio",
        /// The flag of the caller decides; all of the traces without a caller.
        ParentAlwaysOn = "parentbased_always_on",
        /// The flag of the caller decides; none of the traces without a caller.
        ParentAlwaysOff = "parentbased_always_off",
        /// The flag of the caller decides; a share of the traces without a caller.
        ParentRatio = "parentbased_traceidratio",
    }
}

section! {
    /// Traces, exported with the OpenTelemetry protocol (OTLP). A key that is absent has the value of the standard variable
    /// that its description names; without an endpoint, no traces are recorded.
    pub partial struct TracingSection {
        /// URL of the collector. For `http/protobuf`, a URL without a path is that of `/v1/traces`. Or
        /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT`.
        pub endpoint: Option<String>, like "\"http://127.0.0.1:4318\"";
        /// Protocol; `http/protobuf` by default. Or `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`, `OTEL_EXPORTER_OTLP_PROTOCOL`.
        pub protocol: Option<ExportProtocol>;
        /// File with headers of each export, such as a key of the collector: `name=value,name=value`. In addition to
        /// `OTEL_EXPORTER_OTLP_TRACES_HEADERS` or `OTEL_EXPORTER_OTLP_HEADERS`.
        pub headers_file: Option<PathBuf>;
        /// Environment variable with the headers, instead of the file.
        pub headers_env: Option<String>;
        /// File with the certificate authorities of the collector, PEM; those of the system if absent. Or
        /// `OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE`, `OTEL_EXPORTER_OTLP_CERTIFICATE`.
        pub ca: Option<PathBuf>;
        /// Sampler; `parentbased_traceidratio` by default. Or `OTEL_TRACES_SAMPLER`.
        pub sampler: Option<SamplerName>;
        /// Share of the traces that is sampled; 0.01 by default. Or `OTEL_TRACES_SAMPLER_ARG`.
        pub sample_ratio: Option<f64>, in 0.0..=1.0;
        /// Duration from which the trace of a request is exported although it was not sampled, like those of errors and
        /// failovers.
        pub slow: Duration = SLOW, in Duration::from_millis(1)..;
        /// Limit of the traces that are exported in a second although they were not sampled. Those of disconnected callers have the
        /// same limit for themselves, and so have, at gateways, those that are sampled because of the flag of a client.
        pub kept_per_second: u32 = KEPT_PER_SECOND;
        /// Timeout of an export; 10 s by default. Or `OTEL_EXPORTER_OTLP_TRACES_TIMEOUT`, `OTEL_EXPORTER_OTLP_TIMEOUT`, in
        /// milliseconds.
        pub timeout: Option<Duration>, in Duration::from_millis(1)..=Duration::from_secs(60);
    }
}

/// Configuration of traces.
#[derive(Clone, Debug)]
pub struct TracingConfig {
    /// URL to which traces are sent.
    pub endpoint: Uri,
    /// Protocol.
    pub protocol: ExportProtocol,
    /// Certificate authorities of the collector; those of the system if absent.
    pub roots: Option<RootCertStore>,
    /// Sampler at the start of a request.
    pub sampler: HeadSampler,
    /// Decision at its end.
    pub keep: KeepPolicy,
    /// Timeout of an export.
    pub timeout: Duration,
    /// Name of the service, instead of `meridian-ROLE`.
    pub service_name: Option<String>,
    /// Further attributes of the process.
    pub resource: Vec<(String, String)>,
    /// Headers of the file.
    pub(crate) headers: Headers,
}

impl TracingConfig {
    /// Returns the configuration of a process whose callers are processes of the fleet: their flag decides whatever the
    /// sampler is, so that a trace that a gateway samples, or keeps because of a failover, has the spans of all processes.
    #[must_use]
    pub fn behind_gateway(&self) -> TracingConfig {
        TracingConfig { sampler: self.sampler.following_parent(), ..self.clone() }
    }
}

/// Headers of an export; they may be secret.
#[derive(Clone, Default)]
pub(crate) struct Headers(pub(crate) Vec<(String, String)>);

impl std::fmt::Debug for Headers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} headers", self.0.len())
    }
}

impl TracingSection {
    /// Reads the files and the environment variables of the section; `Some(None)` without an endpoint, and `None` after a
    /// problem.
    pub fn read(self, document: &ConfigFile<'_>, files: &Files<'_>) -> Option<Option<TracingConfig>> {
        let environment = Environment { document, files };
        let is_enabled = environment.is_enabled();
        let protocol = self.protocol.and_then(|key| {
            let names = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
            let protocol = key.map_or_else(|| environment.parsed(names), |key| Some(Some(key)));
            protocol.map(|protocol| protocol.unwrap_or(ExportProtocol::Http))
        });
        let endpoint = self.endpoint.and_then(|key| environment.endpoint(key, protocol?));
        let sampler = environment.sampler(self.sampler, self.sample_ratio);
        let timeout = self.timeout.and_then(|key| {
            let names = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
            let millis = key.map_or_else(|| environment.parsed::<Millis>(names), |_| Some(None));
            millis.map(|millis| key.or(millis.map(|Millis(timeout)| timeout)).unwrap_or(TIMEOUT))
        });
        let (headers_file, headers_env) = (self.headers_file?, self.headers_env?);
        let has_headers = headers_file.is_some() || headers_env.is_some();
        let (file, variable) = (headers_file.as_deref(), headers_env.as_deref());
        let headers = files.secret(document, "tracing.headers", file, variable, pairs);
        let of_environment = environment.checked_headers();
        let resource = environment.resource();
        let roots = self.ca.and_then(|ca| environment.roots(ca));
        let service_name = environment.get("OTEL_SERVICE_NAME").map(str::to_owned);
        let headers = match headers {
            Some(headers) => headers,
            // Variables are not known where a file is checked for another machine.
            None if has_headers && files.environment.is_some() => return None,
            None => Vec::new(),
        };
        of_environment?;
        let config = TracingConfig {
            protocol: protocol?,
            roots: roots?,
            sampler: sampler?,
            keep: KeepPolicy { slow: self.slow?, per_second: self.kept_per_second? },
            timeout: timeout?,
            service_name,
            resource: resource?,
            headers: Headers(headers),
            endpoint: match (endpoint?, is_enabled?) {
                (Some(endpoint), true) => endpoint,
                (None, _) | (_, false) => return Some(None),
            },
        };
        Some(Some(config))
    }
}

/// Timeout in milliseconds, as a variable has it.
struct Millis(Duration);

impl FromStr for Millis {
    type Err = String;

    fn from_str(text: &str) -> Result<Millis, String> {
        match text.parse() {
            Ok(millis @ 1..=60_000) => Ok(Millis(Duration::from_millis(millis))),
            Ok(_) | Err(_) => Err(format!("{text:?} is not a timeout; write milliseconds, 1 to 60000")),
        }
    }
}

/// Share of the traces, as a variable has it.
struct Ratio(f64);

impl FromStr for Ratio {
    type Err = String;

    fn from_str(text: &str) -> Result<Ratio, String> {
        match text.parse() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(Ratio(ratio)),
            Ok(_) | Err(_) => Err(format!("{text:?} is not a share; write a number from 0 to 1")),
        }
    }
}

/// Variables of OpenTelemetry.
struct Environment<'a> {
    document: &'a ConfigFile<'a>,
    files: &'a Files<'a>,
}

impl<'a> Environment<'a> {
    /// Returns a variable. An empty one counts as unset, as OpenTelemetry specifies.
    fn get(&self, name: &str) -> Option<&'a str> {
        let value = self.files.environment?.get(name)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// Returns the first of these variables that is set.
    fn first(&self, names: [&'static str; 2]) -> Option<(&'static str, &'a str)> {
        names.into_iter().find_map(|name| Some((name, self.get(name)?)))
    }

    fn problem(&self, name: &str, message: impl Display) {
        self.document.problem("tracing", format!("the variable {name}: {message}"));
    }

    /// Parses the first of these variables that is set; `None` after a problem.
    fn parsed<T: FromStr<Err: Display>>(&self, names: [&'static str; 2]) -> Option<Option<T>> {
        let Some((name, value)) = self.first(names) else { return Some(None) };
        value.parse().map(Some).map_err(|error| self.problem(name, error)).ok()
    }

    fn is_enabled(&self) -> Option<bool> {
        let is_disabled = match self.get("OTEL_SDK_DISABLED") {
            None => false,
            Some(value) if value.eq_ignore_ascii_case("true") => true,
            Some(value) if value.eq_ignore_ascii_case("false") => false,
            Some(value) => {
                self.problem(
                    "OTEL_SDK_DISABLED",
                    format!("{value:?} is unknown; write \"true\" or \"false\""),
                );
                return None;
            }
        };
        match self.get("OTEL_TRACES_EXPORTER") {
            None | Some("otlp") => Some(!is_disabled),
            Some("none") => Some(false),
            Some(value) => {
                let message = format!("{value:?} is not supported; write \"otlp\" or \"none\"");
                self.problem("OTEL_TRACES_EXPORTER", message);
                None
            }
        }
    }

    /// Returns the URL to which traces are sent.
    fn endpoint(&self, key: Option<String>, protocol: ExportProtocol) -> Option<Option<Uri>> {
        let (traces, general) = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT");
        if let Some(text) = key {
            let has_path = text.parse::<Uri>().is_ok_and(|url| !matches!(url.path(), "" | "/"));
            let url = url(&text, protocol == ExportProtocol::Http && !has_path);
            return url.map(Some).map_err(|error| self.document.problem("tracing.endpoint", error)).ok();
        }
        let Some((name, text)) = self.first([traces, general]) else { return Some(None) };
        let url = url(text, protocol == ExportProtocol::Http && name == general);
        url.map(Some).map_err(|error| self.problem(name, error)).ok()
    }

    fn sampler(&self, name: Option<Option<SamplerName>>, ratio: Option<Option<f64>>) -> Option<HeadSampler> {
        let (name_key, ratio_key) = (name?, ratio?);
        let name = match (name_key, ratio_key) {
            (Some(name), _) => name,
            (None, Some(_)) => SamplerName::ParentRatio,
            (None, None) => {
                let name = self.parsed(["OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER"])?;
                name.unwrap_or(SamplerName::ParentRatio)
            }
        };
        let is_parent_based = matches!(
            name,
            SamplerName::ParentAlwaysOn | SamplerName::ParentAlwaysOff | SamplerName::ParentRatio
        );
        let ratio = match name {
            SamplerName::AlwaysOn | SamplerName::ParentAlwaysOn => 1.0,
            SamplerName::AlwaysOff | SamplerName::ParentAlwaysOff => 0.0,
            SamplerName::Ratio | SamplerName::ParentRatio => {
                let variable = ["OTEL_TRACES_SAMPLER_ARG", "OTEL_TRACES_SAMPLER_ARG"];
                let given =
                    ratio_key.map_or_else(|| self.parsed::<Ratio>(variable), |key| Some(Some(Ratio(key))));
                return Some(HeadSampler::new(
                    given?.map_or(SAMPLE_RATIO, |Ratio(ratio)| ratio),
                    is_parent_based,
                ));
            }
        };
        if ratio_key.is_some() {
            let reason = format!("with the sampler \"{name}\"");
            self.document.without_effect("tracing", &["sample_ratio"], &reason);
            return None;
        }
        Some(HeadSampler::new(ratio, is_parent_based))
    }

    /// Checks the headers that the exporter reads itself; `None` after a problem, which does not show them.
    fn checked_headers(&self) -> Option<()> {
        for name in ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"] {
            if let Some(text) = self.get(name) {
                pairs(text).map_err(|error| self.problem(name, error)).ok()?;
            }
        }
        Some(())
    }

    fn resource(&self) -> Option<Vec<(String, String)>> {
        let name = "OTEL_RESOURCE_ATTRIBUTES";
        let Some(text) = self.get(name) else { return Some(Vec::new()) };
        pairs(text).map_err(|error| self.problem(name, error)).ok()
    }

    fn roots(&self, key: Option<PathBuf>) -> Option<Option<RootCertStore>> {
        let names = ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"];
        match (key, self.first(names)) {
            (Some(path), _) => {
                let read = read_roots(&self.files.path(path));
                read.map(Some).map_err(|problem| self.document.problem("tracing.ca", problem)).ok()
            }
            (None, Some((name, path))) => {
                read_roots(Path::new(path)).map(Some).map_err(|problem| self.problem(name, problem)).ok()
            }
            (None, None) => Some(None),
        }
    }
}

/// Parses the URL of a collector, and appends the path of traces if it `is_base`.
fn url(text: &str, is_base: bool) -> Result<Uri, String> {
    // Not shown with a user, also if it cannot be parsed: there may be a password.
    if text.contains('@') {
        return Err("a URL of a collector has no user and no @; write its key into headers_file".to_owned());
    }
    let invalid = || {
        format!("{text:?} is not the URL of a collector; write \"http://HOST:PORT\" or \"https://HOST:PORT\"")
    };
    let parsed: Uri = text.parse().map_err(|_| invalid())?;
    let has_scheme = matches!(parsed.scheme_str(), Some("http" | "https"));
    if !has_scheme || parsed.host().is_none_or(str::is_empty) {
        return Err(invalid());
    }
    if is_base {
        return format!("{}{HTTP_PATH}", text.trim_end_matches('/')).parse().map_err(|_| invalid());
    }
    Ok(parsed)
}

/// Parses `name=value,name=value`; values are percent-encoded. The error does not show them.
fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let entries = || text.trim().split(',').map(str::trim).filter(|entry| !entry.is_empty());
    if entries().count() > PAIRS_MAX {
        return Err(format!("has more than {PAIRS_MAX} entries; write fewer"));
    }
    let read = |entry: &str| {
        let (name, value) = entry.split_once('=')?;
        let (name, value) = (name.trim(), percent_decode_str(value.trim()).decode_utf8().ok()?);
        let is_valid = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
        let is_text = !value.bytes().any(|byte| byte.is_ascii_control());
        (is_valid && is_text).then(|| (name.to_owned(), value.into_owned()))
    };
    let wrong =
        |index: usize| format!("entry {} is not `name=value`; write name=value,name=value", index + 1);
    entries().enumerate().map(|(index, entry)| read(entry).ok_or_else(|| wrong(index))).collect()
}

#[cfg(test)]
mod tests;
