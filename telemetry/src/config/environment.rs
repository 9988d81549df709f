//! Values of the sections, of the files that they name, and of the standard variables `OTEL_*`.
//!
//! The exporter of traces and logs reads `OTEL_EXPORTER_OTLP_HEADERS` itself, so that secrets pass through no other code; here they
//! are only checked. Those of metrics, which that exporter does not send, are read here.

use super::values::{Millis, Ratio, headers, pairs, url};
use super::{CollectorConfig, ExportCompression, ExportProtocol, Headers, SAMPLE_RATIO, SamplerName, Signal};
use configuration::{ConfigFile, Files};
use http::{HeaderName, HeaderValue, Uri};
use identity::authorities::read_roots;
use rustls::RootCertStore;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use telemetry_core::sampling::HeadSampler;

/// Timeout of an export by default, as OpenTelemetry specifies.
const TIMEOUT: Duration = Duration::from_secs(10);

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
                Signal::Metrics => concat!("OTEL_EXPORTER_OTLP_METRICS_", $setting),
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

/// Variables of OpenTelemetry, and the file that takes precedence.
///
/// Variables are for all processes of a machine. Those of a signal that this process does not export are not read, so that an
/// invalid one does not prevent its start.
pub(super) struct CollectorVariables<'a> {
    document: &'a ConfigFile<'a>,
    files: &'a Files<'a>,
    signal: Signal,
    /// Whether the variables permit the export; `None` after a problem.
    is_enabled: Option<bool>,
    /// Whether the signal is exported if there is no problem.
    is_exported: bool,
}

impl<'a> CollectorVariables<'a> {
    /// Returns the variables of a signal, of which the section has this endpoint.
    pub(super) fn new(
        document: &'a ConfigFile<'a>,
        files: &'a Files<'a>,
        signal: Signal,
        endpoint: Option<&Option<String>>,
    ) -> CollectorVariables<'a> {
        let variables = CollectorVariables { document, files, signal, is_enabled: None, is_exported: true };
        let is_enabled = variables.is_enabled();
        // Also an endpoint that has a problem.
        let has_endpoint =
            !matches!(endpoint, Some(None)) || variables.first(&variables!(signal, "ENDPOINT")).is_some();
        CollectorVariables { is_enabled, is_exported: has_endpoint && is_enabled != Some(false), ..variables }
    }

    /// Returns the collector of the signal; `Some(None)` without an endpoint, and `None` after a problem.
    pub(super) fn collector(&self, keys: CollectorKeys) -> Option<Option<CollectorConfig>> {
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
        let compression = self.parsed(&variables!(self.signal, "COMPRESSION"));
        let headers = self.headers(keys.headers_file?, keys.headers_env?);
        let of_environment = self.checked_headers();
        let resource = self.resource();
        let roots = keys.ca.and_then(|ca| self.roots(ca));
        let service_name = self.of_export("OTEL_SERVICE_NAME").map(str::to_owned);
        let client_certificate = self.no_client_certificate();
        of_environment.and(client_certificate)?;
        let (headers, resource, roots, timeout) = (headers?, resource?, roots?, timeout?);
        let (endpoint, protocol, is_enabled) = (endpoint?, protocol?, self.is_enabled?);
        let compression = compression?.unwrap_or(ExportCompression::None);
        Some(endpoint.filter(|_| is_enabled).map(|endpoint| CollectorConfig {
            signal: self.signal,
            endpoint,
            protocol,
            compression,
            roots,
            timeout,
            service_name,
            resource,
            headers,
        }))
    }

    /// Returns a variable. An empty one counts as unset, as OpenTelemetry specifies.
    fn get(&self, name: &str) -> Option<&'a str> {
        let value = match self.files.environment?.get(name)? {
            Ok(value) => value.trim(),
            Err(error) => {
                self.problem(name, error);
                return None;
            }
        };
        (!value.is_empty()).then_some(value)
    }

    /// Returns a variable of exports, if the signal is exported.
    fn of_export(&self, name: &str) -> Option<&'a str> {
        if self.is_exported { self.get(name) } else { None }
    }

    /// Returns the first of these variables that is set, if the signal is exported.
    fn first(&self, variables: &Variables) -> Option<(&'static str, &'a str)> {
        [variables.own, variables.general].into_iter().find_map(|name| Some((name, self.of_export(name)?)))
    }

    fn problem(&self, name: &str, message: impl Display) {
        self.document.problem(self.signal.table(), format!("the variable {name}: {message}"));
    }

    /// Records a problem with a key of the section.
    fn problem_of_key(&self, key: &str, message: impl Display) {
        self.document.problem(&format!("{}.{key}", self.signal.table()), message);
    }

    /// Parses the first of these variables that is set, if the signal is exported; `None` after a problem.
    fn parsed<T: FromStr<Err: Display>>(&self, variables: &Variables) -> Option<Option<T>> {
        let Some((name, value)) = self.first(variables) else { return Some(None) };
        value.parse().map(Some).map_err(|error| self.problem(name, error)).ok()
    }

    /// Parses a variable if it is set and the signal is exported; `None` after a problem.
    pub(super) fn parsed_one<T: FromStr<Err: Display>>(&self, name: &'static str) -> Option<Option<T>> {
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
            Signal::Metrics => "OTEL_METRICS_EXPORTER",
        };
        match self.get(name) {
            None | Some("otlp") => Some(!is_disabled),
            Some("none") => Some(false),
            // `/metrics` is always served.
            Some("prometheus") if self.signal == Signal::Metrics => Some(false),
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
            Signal::Metrics => Some("/v1/metrics"),
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
        let read = self.files.secret(self.document, &name, file.as_deref(), variable.as_deref(), headers);
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
            if let Some(text) = self.of_export(name) {
                headers(text).map_err(|error| self.problem(name, error)).ok()?;
            }
        }
        Some(())
    }

    /// Returns the headers of the variables, for a signal that is exported without the exporter that reads them; `None` after a
    /// problem, which [`Self::collector`] records.
    pub(super) fn exporter_headers(&self) -> Option<Vec<(HeaderName, HeaderValue)>> {
        let set = self.first(&variables!(self.signal, "HEADERS"));
        set.map_or(Some(Vec::new()), |(_, text)| headers(text).ok())
    }

    /// Checks that no variable sets a certificate of the client; `None` after a problem.
    fn no_client_certificate(&self) -> Option<()> {
        let settings = [variables!(self.signal, "CLIENT_KEY"), variables!(self.signal, "CLIENT_CERTIFICATE")];
        let found: Vec<_> = settings.iter().filter_map(|variables| self.first(variables)).collect();
        for (name, _) in &found {
            self.problem(
                name,
                "certificates of clients are not supported; unset it, and write a key of the collector into \
                 headers_file, or send to a local collector that has the certificate",
            );
        }
        found.is_empty().then_some(())
    }

    fn resource(&self) -> Option<Vec<(String, String)>> {
        let name = "OTEL_RESOURCE_ATTRIBUTES";
        let Some(text) = self.of_export(name) else { return Some(Vec::new()) };
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
