//! Values of the sections, of the files that they name, and of the standard variables `OTEL_*`.
//!
//! The exporter reads `OTEL_EXPORTER_OTLP_HEADERS` itself, so that secrets pass through no other code; here they are only
//! checked.

use super::{CollectorConfig, ExportProtocol, Headers, SAMPLE_RATIO, SamplerName, Signal};
use configuration::{ConfigFile, Files};
use http::Uri;
use identity::authorities::read_roots;
use percent_encoding::percent_decode_str;
use rustls::RootCertStore;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use telemetry_core::sampling::HeadSampler;

/// Timeout of an export by default, as OpenTelemetry specifies.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of headers of an export, and of attributes of the process.
pub(super) const PAIRS_MAX: usize = 64;

/// Variables of a setting, of which the first one that is set is used: that of the signal, and that of all signals.
struct Variables {
    own: &'static str,
    general: &'static str,
}

/// Returns the variables of a setting.
macro_rules! variables {
    ($signal:expr, $setting:literal) => {
        Variables {
            own: match $signal {
                Signal::Traces => concat!("OTEL_EXPORTER_OTLP_TRACES_", $setting),
                Signal::Logs => concat!("OTEL_EXPORTER_OTLP_LOGS_", $setting),
            },
            general: concat!("OTEL_EXPORTER_OTLP_", $setting),
        }
    };
}

/// Keys of a section that describe its collector; each is `None` after a problem.
pub(super) struct CollectorKeys {
    pub(super) endpoint: Option<Option<String>>,
    pub(super) protocol: Option<Option<ExportProtocol>>,
    pub(super) headers_file: Option<Option<PathBuf>>,
    pub(super) headers_env: Option<Option<String>>,
    pub(super) ca: Option<Option<PathBuf>>,
    pub(super) timeout: Option<Option<Duration>>,
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

/// Variables of OpenTelemetry, and the file that takes precedence.
pub(super) struct Environment<'a> {
    pub(super) document: &'a ConfigFile<'a>,
    pub(super) files: &'a Files<'a>,
    pub(super) signal: Signal,
}

impl<'a> Environment<'a> {
    /// Returns the collector of the signal; `Some(None)` without an endpoint, and `None` after a problem.
    pub(super) fn collector(&self, keys: CollectorKeys) -> Option<Option<CollectorConfig>> {
        let is_enabled = self.is_enabled();
        let protocol = keys.protocol.and_then(|key| {
            let variables = variables!(self.signal, "PROTOCOL");
            let protocol = key.map_or_else(|| self.parsed(&variables), |key| Some(Some(key)));
            protocol.map(|protocol| protocol.unwrap_or(ExportProtocol::Http))
        });
        let endpoint = keys.endpoint.and_then(|key| self.endpoint(key, protocol?));
        let timeout = keys.timeout.and_then(|key| {
            let variables = variables!(self.signal, "TIMEOUT");
            let millis = key.map_or_else(|| self.parsed::<Millis>(&variables), |_| Some(None));
            millis.map(|millis| key.or(millis.map(|Millis(timeout)| timeout)).unwrap_or(TIMEOUT))
        });
        let headers = self.headers(keys.headers_file?, keys.headers_env?);
        let of_environment = self.checked_headers();
        let resource = self.resource();
        let roots = keys.ca.and_then(|ca| self.roots(ca));
        let service_name = self.get("OTEL_SERVICE_NAME").map(str::to_owned);
        of_environment?;
        let (headers, resource, roots, timeout) = (headers?, resource?, roots?, timeout?);
        let (endpoint, protocol, is_enabled) = (endpoint?, protocol?, is_enabled?);
        Some(endpoint.filter(|_| is_enabled).map(|endpoint| CollectorConfig {
            signal: self.signal,
            endpoint,
            protocol,
            roots,
            timeout,
            service_name,
            resource,
            headers,
        }))
    }

    /// Returns a variable. An empty one counts as unset, as OpenTelemetry specifies.
    fn get(&self, name: &str) -> Option<&'a str> {
        let value = self.files.environment?.get(name)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// Returns the first of these variables that is set.
    fn first(&self, variables: &Variables) -> Option<(&'static str, &'a str)> {
        [variables.own, variables.general].into_iter().find_map(|name| Some((name, self.get(name)?)))
    }

    fn problem(&self, name: &str, message: impl Display) {
        self.document.problem(self.signal.table(), format!("the variable {name}: {message}"));
    }

    /// Records a problem with a key of the section.
    fn problem_of_key(&self, key: &str, message: impl Display) {
        self.document.problem(&format!("{}.{key}", self.signal.table()), message);
    }

    /// Parses the first of these variables that is set; `None` after a problem.
    fn parsed<T: FromStr<Err: Display>>(&self, variables: &Variables) -> Option<Option<T>> {
        let Some((name, value)) = self.first(variables) else { return Some(None) };
        value.parse().map(Some).map_err(|error| self.problem(name, error)).ok()
    }

    /// Parses a variable if it is set; `None` after a problem.
    fn parsed_one<T: FromStr<Err: Display>>(&self, name: &'static str) -> Option<Option<T>> {
        self.parsed(&Variables { own: name, general: name })
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
        let name = match self.signal {
            Signal::Traces => "OTEL_TRACES_EXPORTER",
            Signal::Logs => "OTEL_LOGS_EXPORTER",
        };
        match self.get(name) {
            None | Some("otlp") => Some(!is_disabled),
            Some("none") => Some(false),
            Some(value) => {
                self.problem(name, format!("{value:?} is not supported; write \"otlp\" or \"none\""));
                None
            }
        }
    }

    /// Returns the URL of the exports.
    fn endpoint(&self, key: Option<String>, protocol: ExportProtocol) -> Option<Option<Uri>> {
        let variables = variables!(self.signal, "ENDPOINT");
        let path = |is_base: bool| match self.signal {
            _ if protocol == ExportProtocol::Grpc || !is_base => None,
            Signal::Traces => Some("/v1/traces"),
            Signal::Logs => Some("/v1/logs"),
        };
        if let Some(text) = key {
            let has_path = text.parse::<Uri>().is_ok_and(|url| !matches!(url.path(), "" | "/"));
            let url = url(&text, path(!has_path));
            return url.map(Some).map_err(|error| self.problem_of_key("endpoint", error)).ok();
        }
        let Some((name, text)) = self.first(&variables) else { return Some(None) };
        let url = url(text, path(name == variables.general));
        url.map(Some).map_err(|error| self.problem(name, error)).ok()
    }

    pub(super) fn sampler(
        &self,
        name: Option<Option<SamplerName>>,
        ratio: Option<Option<f64>>,
    ) -> Option<HeadSampler> {
        let (name_key, ratio_key) = (name?, ratio?);
        let name = match (name_key, ratio_key) {
            (Some(name), _) => name,
            (None, Some(_)) => SamplerName::ParentRatio,
            (None, None) => self.parsed_one("OTEL_TRACES_SAMPLER")?.unwrap_or(SamplerName::ParentRatio),
        };
        let is_parent_based = matches!(
            name,
            SamplerName::ParentAlwaysOn | SamplerName::ParentAlwaysOff | SamplerName::ParentRatio
        );
        let ratio = match name {
            SamplerName::AlwaysOn | SamplerName::ParentAlwaysOn => 1.0,
            SamplerName::AlwaysOff | SamplerName::ParentAlwaysOff => 0.0,
            SamplerName::Ratio | SamplerName::ParentRatio => {
                let given = ratio_key.map_or_else(
                    || self.parsed_one::<Ratio>("OTEL_TRACES_SAMPLER_ARG"),
                    |key| Some(Some(Ratio(key))),
                );
                return Some(HeadSampler::new(
                    given?.map_or(SAMPLE_RATIO, |Ratio(ratio)| ratio),
                    is_parent_based,
                ));
            }
        };
        if ratio_key.is_some() {
            let reason = format!("with the sampler \"{name}\"");
            self.document.without_effect(self.signal.table(), &["sample_ratio"], &reason);
            return None;
        }
        Some(HeadSampler::new(ratio, is_parent_based))
    }

    /// Returns the headers of the section.
    fn headers(&self, file: Option<PathBuf>, variable: Option<String>) -> Option<Headers> {
        let has_headers = file.is_some() || variable.is_some();
        let name = format!("{}.headers", self.signal.table());
        let read = self.files.secret(self.document, &name, file.as_deref(), variable.as_deref(), pairs);
        match read {
            Some(headers) => Some(Headers(headers)),
            // Variables are not known where a file is checked for another machine.
            None if has_headers && self.files.environment.is_some() => None,
            None => Some(Headers::default()),
        }
    }

    /// Checks the headers that the exporter reads itself; `None` after a problem, which does not show them.
    fn checked_headers(&self) -> Option<()> {
        let Variables { own, general } = variables!(self.signal, "HEADERS");
        for name in [own, general] {
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
        match (key, self.first(&variables!(self.signal, "CERTIFICATE"))) {
            (Some(path), _) => {
                let read = read_roots(&self.files.path(path));
                read.map(Some).map_err(|problem| self.problem_of_key("ca", problem)).ok()
            }
            (None, Some((name, path))) => {
                read_roots(Path::new(path)).map(Some).map_err(|problem| self.problem(name, problem)).ok()
            }
            (None, None) => Some(None),
        }
    }
}

/// Parses the URL of a collector, and appends a path.
fn url(text: &str, path: Option<&str>) -> Result<Uri, String> {
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
    match path {
        Some(path) => format!("{}{path}", text.trim_end_matches('/')).parse().map_err(|_| invalid()),
        None => Ok(parsed),
    }
}

/// Parses `name=value,name=value`; values are percent-encoded. The error does not show them.
pub(super) fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
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
