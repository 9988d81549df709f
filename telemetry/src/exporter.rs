//! Exporters of OpenTelemetry for a collector, and the attributes of the process.

use crate::config::{CollectorConfig, ExportProtocol, Headers};
use crate::connector::{CollectorConnector, HttpExportClient};
use http::{HeaderName, HeaderValue, Uri};
use opentelemetry::KeyValue;
use opentelemetry_otlp::{
    ExporterBuildError, LogExporter, SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig,
};
use opentelemetry_sdk::Resource;
use std::sync::OnceLock;
use std::time::Duration;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};

/// Timeout of a connection attempt, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time beyond the exporter's own timeout after which an export is abandoned.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

/// Identifier of the process, the same in its traces and in its logs.
static INSTANCE: OnceLock<String> = OnceLock::new();

/// Error that prevents the export of traces or logs.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The exporter rejects the configuration or a variable `OTEL_*`, such as an unknown compression. The process does not
    /// start.
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
    /// A header of `headers_file` or `headers_env` has a name or a value that HTTP does not permit. The process does not start.
    #[error("entry {entry} of {table}.headers is not a header of HTTP; write name=value")]
    Header {
        /// Table of the file.
        table: &'static str,
        /// Number of the entry, from 1.
        entry: usize,
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

/// Returns an exporter of spans; must be called in a runtime.
pub(crate) fn spans(config: &CollectorConfig) -> Result<SpanExporter, ExportError> {
    let built = match config.protocol {
        ExportProtocol::Grpc => grpc(SpanExporter::builder().with_tonic(), config)?.build(),
        ExportProtocol::Http => http(SpanExporter::builder().with_http(), config)?.build(),
    };
    built.map_err(|error| ExportError::Exporter { signal: config.signal.name(), error })
}

/// Returns an exporter of events of the log; must be called in a runtime.
pub(crate) fn logs(config: &CollectorConfig) -> Result<LogExporter, ExportError> {
    let built = match config.protocol {
        ExportProtocol::Grpc => grpc(LogExporter::builder().with_tonic(), config)?.build(),
        ExportProtocol::Http => http(LogExporter::builder().with_http(), config)?.build(),
    };
    built.map_err(|error| ExportError::Exporter { signal: config.signal.name(), error })
}

fn grpc<B: WithExportConfig + WithTonicConfig>(
    builder: B,
    config: &CollectorConfig,
) -> Result<B, ExportError> {
    let channel = channel(&config.endpoint, connector(config)?)
        .map_err(|error| ExportError::Endpoint { signal: config.signal.name(), error })?;
    let builder = builder.with_timeout(config.timeout).with_metadata(metadata(config)?);
    Ok(builder.with_channel(channel))
}

fn http<B: WithExportConfig + WithHttpConfig>(
    builder: B,
    config: &CollectorConfig,
) -> Result<B, ExportError> {
    metadata(config)?;
    Ok(builder
        .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
        .with_endpoint(config.endpoint.to_string())
        .with_timeout(config.timeout)
        .with_headers(config.headers.0.iter().cloned().collect())
        .with_http_client(HttpExportClient::new(connector(config)?, config.timeout)))
}

fn connector(config: &CollectorConfig) -> Result<CollectorConnector, ExportError> {
    let CollectorConfig { signal, endpoint, protocol, roots, .. } = config;
    CollectorConnector::new(endpoint, *protocol, roots.as_ref(), CONNECT_TIMEOUT)
        .map_err(|error| ExportError::Authorities { table: signal.table(), error })
}

/// Returns a channel to the collector. It connects with the first export, over the connector's own TLS; requests have the
/// scheme of the URL.
fn channel(endpoint: &Uri, connector: CollectorConnector) -> Result<Channel, tonic::transport::Error> {
    let authority = endpoint.authority().map_or("", |authority| authority.as_str());
    let channel = Endpoint::from_shared(format!("http://{authority}"))?.origin(endpoint.clone());
    Ok(channel.connect_with_connector_lazy(connector))
}

fn metadata(config: &CollectorConfig) -> Result<MetadataMap, ExportError> {
    let mut map = http::HeaderMap::new();
    let Headers(headers) = &config.headers;
    for (index, (name, value)) in headers.iter().enumerate() {
        let (name, value) = (HeaderName::try_from(name.as_str()), HeaderValue::try_from(value.as_str()));
        let (Ok(name), Ok(mut value)) = (name, value) else {
            return Err(ExportError::Header { table: config.signal.table(), entry: index + 1 });
        };
        value.set_sensitive(true);
        map.insert(name, value);
    }
    Ok(MetadataMap::from_headers(map))
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
