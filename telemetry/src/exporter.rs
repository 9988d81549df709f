//! Exporters of OpenTelemetry for a collector, and the attributes of the process.

use crate::config::{CollectorConfig, ExportCompression, ExportProtocol, Headers};
use crate::connector::{CollectorConnector, HttpExportClient};
use crate::outcome::LastOutcome;
use http::uri::Scheme;
use http::{HeaderMap, Uri};
use opentelemetry::KeyValue;
use opentelemetry_otlp::{
    Compression, ExporterBuildError, LogExporter, SpanExporter, WithExportConfig, WithHttpConfig,
    WithTonicConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::LogExporter as _;
use opentelemetry_sdk::trace::SpanExporter as _;
use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::Duration;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};

/// Timeout of a connection attempt, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time beyond the exporter's own timeout after which an export is abandoned.
const GRACE: Duration = Duration::from_secs(1);

/// Identifier of the process, the same in its traces, its logs and its metrics.
static INSTANCE: OnceLock<String> = OnceLock::new();

/// Error that prevents the export of traces, logs or metrics.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The exporter rejects the configuration. The process does not start.
    #[error("the exporter of {signal} cannot be created: {error}")]
    Exporter {
        /// Signal.
        signal: &'static str,
        /// Reason.
        error: ExporterBuildError,
    },
    /// The certificate authorities of the system cannot be read. The process does not start.
    #[error("the certificate authorities of the system cannot be read: {error}; set {table}.ca")]
    Authorities {
        /// Table of the file.
        table: &'static str,
        /// Reason.
        error: rustls::Error,
    },
    /// The URL of the collector cannot be used. The process does not start.
    #[error("the endpoint of {signal} cannot be used: {error}")]
    Endpoint {
        /// Signal.
        signal: &'static str,
        /// Reason.
        error: tonic::transport::Error,
    },
    /// The system has no thread for the export of logs. The process does not start.
    #[error("the thread that exports logs cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Process that exports.
#[derive(Clone, Copy, Debug)]
pub struct Process<'a> {
    /// Role, such as `gateway`.
    pub role: &'static str,
    /// Region, if it has one.
    pub region: Option<&'a str>,
}

/// Exporter of one signal.
pub(crate) struct CollectorExporter<E> {
    pub(crate) otlp: E,
    /// Time after which an export is abandoned.
    pub(crate) timeout: Duration,
    /// Outcome of the last request by HTTP.
    pub(crate) last: LastOutcome,
}

/// Returns an exporter of the spans of a process; must be called in a runtime.
pub(crate) fn spans(
    config: &CollectorConfig,
    process: Process<'_>,
) -> Result<CollectorExporter<SpanExporter>, ExportError> {
    let last = LastOutcome::default();
    let built = match config.protocol {
        ExportProtocol::Grpc => grpc(SpanExporter::builder().with_tonic(), config)?.build(),
        ExportProtocol::Http => http(SpanExporter::builder().with_http(), config, &last)?.build(),
    };
    let mut otlp = built.map_err(|error| ExportError::Exporter { signal: config.signal.name(), error })?;
    otlp.set_resource(&resource(config, process));
    Ok(CollectorExporter { otlp, timeout: config.timeout + GRACE, last })
}

/// Returns an exporter of the log of a process; must be called in a runtime.
pub(crate) fn logs(
    config: &CollectorConfig,
    process: Process<'_>,
) -> Result<CollectorExporter<LogExporter>, ExportError> {
    let last = LastOutcome::default();
    let built = match config.protocol {
        ExportProtocol::Grpc => grpc(LogExporter::builder().with_tonic(), config)?.build(),
        ExportProtocol::Http => http(LogExporter::builder().with_http(), config, &last)?.build(),
    };
    let mut otlp = built.map_err(|error| ExportError::Exporter { signal: config.signal.name(), error })?;
    otlp.set_resource(&resource(config, process));
    Ok(CollectorExporter { otlp, timeout: config.timeout + GRACE, last })
}

fn grpc<B: WithExportConfig + WithTonicConfig>(
    builder: B,
    config: &CollectorConfig,
) -> Result<B, ExportError> {
    let channel = collector_channel(config)?;
    let builder = builder.with_timeout(config.timeout).with_metadata(metadata(config)).with_channel(channel);
    Ok(match config.compression {
        ExportCompression::Gzip => builder.with_compression(Compression::Gzip),
        ExportCompression::None => builder,
    })
}

fn http<B: WithExportConfig + WithHttpConfig>(
    builder: B,
    config: &CollectorConfig,
    last: &LastOutcome,
) -> Result<B, ExportError> {
    let client = http_client(config, last)?;
    let builder = builder
        .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
        .with_endpoint(config.endpoint.to_string())
        .with_timeout(config.timeout)
        .with_headers(encoded_headers(config))
        .with_http_client(client);
    Ok(match config.compression {
        ExportCompression::Gzip => builder.with_compression(Compression::Gzip),
        ExportCompression::None => builder,
    })
}

/// Returns a client of exports by HTTP, which stores the outcome of its last request.
pub(crate) fn http_client(
    config: &CollectorConfig,
    last: &LastOutcome,
) -> Result<HttpExportClient, ExportError> {
    Ok(HttpExportClient::new(connector(config)?, config.timeout, config.signal, last.clone()))
}

/// Returns a channel to the collector for exports by gRPC.
pub(crate) fn collector_channel(config: &CollectorConfig) -> Result<Channel, ExportError> {
    channel(&config.endpoint, connector(config)?)
        .map_err(|error| ExportError::Endpoint { signal: config.signal.name(), error })
}

fn connector(config: &CollectorConfig) -> Result<CollectorConnector, ExportError> {
    let CollectorConfig { signal, endpoint, protocol, roots, .. } = config;
    CollectorConnector::new(endpoint, *protocol, roots.as_ref(), CONNECT_TIMEOUT)
        .map_err(|error| ExportError::Authorities { table: signal.table(), error })
}

/// Returns a channel to the collector. It connects with the first export, over the connector's own TLS; requests have the
/// scheme of the URL.
fn channel(endpoint: &Uri, connector: CollectorConnector) -> Result<Channel, tonic::transport::Error> {
    let channel = Endpoint::from_shared(connect_url(endpoint))?.origin(endpoint.clone());
    Ok(channel.connect_with_connector_lazy(connector))
}

/// Returns the URL that the connector of a channel connects to, in plaintext as far as the channel knows. It always has a port,
/// because the default one is that of the scheme of the collector.
fn connect_url(endpoint: &Uri) -> String {
    let host = endpoint.host().unwrap_or_default();
    let default = if endpoint.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    format!("http://{host}:{}", endpoint.port_u16().unwrap_or(default))
}

/// Returns the headers of each export.
pub(crate) fn metadata(config: &CollectorConfig) -> MetadataMap {
    let mut map = HeaderMap::new();
    let Headers(headers) = &config.headers;
    for (name, value) in headers {
        map.insert(name, value.clone());
    }
    MetadataMap::from_headers(map)
}

/// Returns the headers for the exporter by HTTP, which decodes their values.
fn encoded_headers(config: &CollectorConfig) -> HashMap<String, String> {
    let Headers(headers) = &config.headers;
    let encoded = headers.iter().filter_map(|(name, value)| {
        // A value is ASCII (`config`).
        let value = value.to_str().ok()?.replace('%', "%25");
        Some((name.to_string(), value))
    });
    encoded.collect()
}

/// Returns the attributes of the process, by the semantic conventions.
pub(crate) fn resource(config: &CollectorConfig, process: Process<'_>) -> Resource {
    let Process { role, region } = process;
    let name = config.service_name.clone().unwrap_or_else(|| format!("meridian-{role}"));
    let provider = region.and_then(|region| region.split_once('/')).map(|(provider, _)| provider.to_owned());
    let instance = INSTANCE.get_or_init(|| format!("{:032x}", rand::random::<u128>()));
    let own = [
        Some(("service.name".to_owned(), name)),
        Some(("service.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())),
        Some(("service.instance.id".to_owned(), instance.clone())),
        region.map(|region| ("cloud.region".to_owned(), region.to_owned())),
        provider.map(|provider| ("cloud.provider".to_owned(), provider)),
    ];
    // The name is that of OTEL_SERVICE_NAME or the role; every other attribute can be set in the environment.
    let configured = config.resource.iter().filter(|(name, _)| name != "service.name").cloned();
    let attributes = own.into_iter().flatten().chain(configured);
    Resource::builder_empty()
        .with_attributes(attributes.map(|(name, value)| KeyValue::new(name, value)))
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_without_a_port_connects_to_that_of_the_scheme() {
        for (endpoint, url) in [
            ("https://collector", "http://collector:443"),
            ("http://collector", "http://collector:80"),
            ("https://collector:4317/", "http://collector:4317"),
            ("http://[::1]", "http://[::1]:80"),
            ("https://[::1]:4317", "http://[::1]:4317"),
        ] {
            assert_eq!(connect_url(&endpoint.parse().unwrap()), url, "{endpoint}");
        }
    }
}
