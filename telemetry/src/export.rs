//! Export of spans to a collector.
//!
//! One task takes the waiting spans once a second, or earlier if there are many, and sends them in batches. An export that
//! fails is repeated by the exporter within its timeout; then its spans are dropped and counted. The task logs a failure
//! and the recovery after it, not every failed export.

use crate::config::{ExportProtocol, Headers, TracingConfig};
use crate::connector::{CollectorConnector, HttpExportClient};
use crate::tracer::{DropReason, Tracer, WAKE_SPANS};
use http::{HeaderName, HeaderValue, Uri};
use opentelemetry::trace::{Link, SpanContext, SpanKind as OtelKind, Status, TraceFlags, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, SpanId as OtelSpanId, TraceId as OtelTraceId, Value};
use opentelemetry_otlp::{
    ExporterBuildError, SpanExporter as OtlpExporter, WithExportConfig, WithHttpConfig, WithTonicConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::trace::{SpanData, SpanExporter, SpanLinks};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use supervision::task::supervise_until_done;
use telemetry_core::context::{SpanId, TraceContext};
use telemetry_core::span::{AttributeValue, SpanKind, SpanRecord};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};

/// Period of exports.
const PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of spans of an export: some 200 KiB, which a collector accepts (4 MiB by default).
const BATCH_SPANS_MAX: usize = WAKE_SPANS;
/// Timeout of a connection attempt, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time beyond the exporter's own timeout after which an export is abandoned.
const GRACE: Duration = Duration::from_secs(1);

/// Error that prevents the export of traces.
#[derive(Debug, thiserror::Error)]
pub enum TracingError {
    /// The exporter rejects the configuration or a variable `OTEL_*`, such as an unknown compression. The process does not
    /// start.
    #[error("traces cannot be exported: {0}")]
    Exporter(#[from] ExporterBuildError),
    /// The certificate authorities of the system cannot be read. The process does not start.
    #[error("the certificate authorities of the system cannot be read: {0}; set tracing.ca")]
    Authorities(rustls::Error),
    /// A header of `tracing.headers_file` or `tracing.headers_env` has a name or a value that HTTP does not permit. The
    /// process does not start.
    #[error("entry {0} of tracing.headers is not a header of HTTP; write name=value")]
    Header(usize),
    /// The URL of the collector cannot be used. The process does not start.
    #[error("the endpoint of traces cannot be used: {0}")]
    Endpoint(#[from] tonic::transport::Error),
}

/// Task that exports spans; ended by [`TraceExport::finish`], and aborted on drop.
pub struct TraceExport {
    task: JoinHandle<()>,
    end: watch::Sender<bool>,
}

impl TraceExport {
    /// Exports the spans that wait, for at most `limit`, and ends the task.
    pub async fn finish(mut self, limit: Duration) {
        self.end.send_replace(true);
        // After that, the spans are lost. Requests had their responses before.
        tokio::time::timeout(limit, &mut self.task).await.ok();
    }
}

impl Drop for TraceExport {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts the export of the traces of a process with this role, such as `gateway`, in this region; must be called in a
/// runtime.
///
/// # Errors
///
/// When the exporter cannot be created. A collector that cannot be reached is no error.
pub fn start(
    config: &TracingConfig,
    role: &'static str,
    region: Option<&str>,
) -> Result<(Tracer, TraceExport), TracingError> {
    let tracer = Tracer::new(config.sampler, config.keep);
    let mut exporter = exporter(config)?;
    exporter.set_resource(&resource(config, role, region));
    let (end, ended) = watch::channel(false);
    let (spans, exporter) = (tracer.clone(), Arc::new(exporter));
    let timeout = config.timeout + GRACE;
    let task = tokio::spawn(supervise_until_done("trace export", move || {
        run(spans.clone(), exporter.clone(), timeout, ended.clone())
    }));
    Ok((tracer, TraceExport { task, end }))
}

fn exporter(config: &TracingConfig) -> Result<OtlpExporter, TracingError> {
    let TracingConfig { endpoint, protocol, roots, timeout, headers, .. } = config;
    let connector = CollectorConnector::new(endpoint, *protocol, roots.as_ref(), CONNECT_TIMEOUT)
        .map_err(TracingError::Authorities)?;
    let exporter = match protocol {
        ExportProtocol::Grpc => OtlpExporter::builder()
            .with_tonic()
            .with_timeout(*timeout)
            .with_metadata(metadata(headers)?)
            .with_channel(channel(endpoint, connector)?)
            .build()?,
        ExportProtocol::Http => {
            metadata(headers)?;
            OtlpExporter::builder()
                .with_http()
                .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                .with_endpoint(endpoint.to_string())
                .with_timeout(*timeout)
                .with_headers(headers.0.iter().cloned().collect())
                .with_http_client(HttpExportClient::new(connector, *timeout))
                .build()?
        }
    };
    Ok(exporter)
}

/// Returns a channel to the collector. It connects with the first export, over the connector's own TLS; requests have the
/// scheme of the URL.
fn channel(endpoint: &Uri, connector: CollectorConnector) -> Result<Channel, TracingError> {
    let authority = endpoint.authority().map_or("", |authority| authority.as_str());
    let channel = Endpoint::from_shared(format!("http://{authority}"))?.origin(endpoint.clone());
    Ok(channel.connect_with_connector_lazy(connector))
}

fn metadata(headers: &Headers) -> Result<MetadataMap, TracingError> {
    let mut map = http::HeaderMap::new();
    for (index, (name, value)) in headers.0.iter().enumerate() {
        let (name, value) = (HeaderName::try_from(name.as_str()), HeaderValue::try_from(value.as_str()));
        let (Ok(name), Ok(mut value)) = (name, value) else { return Err(TracingError::Header(index + 1)) };
        value.set_sensitive(true);
        map.insert(name, value);
    }
    Ok(MetadataMap::from_headers(map))
}

/// Returns the attributes of the process, by the semantic conventions.
fn resource(config: &TracingConfig, role: &str, region: Option<&str>) -> Resource {
    let name = config.service_name.clone().unwrap_or_else(|| format!("meridian-{role}"));
    let provider = region.and_then(|region| region.split_once('/')).map(|(provider, _)| provider.to_owned());
    let own = [
        Some(("service.name".to_owned(), name)),
        Some(("service.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())),
        Some(("service.instance.id".to_owned(), format!("{:032x}", rand::random::<u128>()))),
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

async fn run(
    tracer: Tracer,
    exporter: Arc<OtlpExporter>,
    timeout: Duration,
    mut ended: watch::Receiver<bool>,
) {
    let scope = InstrumentationScope::builder("meridian").with_version(env!("CARGO_PKG_VERSION")).build();
    let mut is_failing = false;
    loop {
        let is_last = tokio::select! {
            () = tokio::time::sleep(PERIOD) => false,
            () = tracer.shared().wake.notified() => false,
            _ = ended.wait_for(|ended| *ended) => true,
        };
        let mut batch = Vec::new();
        for request in tracer.take() {
            batch.extend(request.into_iter().map(|span| span_data(span, &scope)));
            if batch.len() >= BATCH_SPANS_MAX {
                send(&tracer, &exporter, timeout, std::mem::take(&mut batch), &mut is_failing).await;
            }
        }
        if !batch.is_empty() {
            send(&tracer, &exporter, timeout, batch, &mut is_failing).await;
        }
        if is_last {
            return;
        }
    }
}

/// Sends a batch, and counts its spans.
async fn send(
    tracer: &Tracer,
    exporter: &OtlpExporter,
    timeout: Duration,
    batch: Vec<SpanData>,
    is_failing: &mut bool,
) {
    let count = batch.len() as u64;
    let counts = &tracer.shared().counts;
    let sent = tokio::time::timeout(timeout, exporter.export(batch)).await;
    match sent.unwrap_or(Err(OTelSdkError::Timeout(timeout))) {
        Ok(()) => {
            counts.exported.add(count);
            if std::mem::take(is_failing) {
                // The collector accepts spans again.
                tracing::info!("export of traces recovered");
            }
        }
        Err(error) => {
            counts.dropped.of(DropReason::ExportFailed).add(count);
            if !std::mem::replace(is_failing, true) {
                // The collector cannot be reached, or rejects spans. Requests are not affected; spans are dropped and
                // counted until it recovers. Check the endpoint and the collector.
                tracing::warn!(%error, spans = count, "export of traces failed");
            }
        }
    }
}

/// Converts a span to the type of the exporter.
fn span_data(span: SpanRecord, scope: &InstrumentationScope) -> SpanData {
    let SpanRecord { trace, id, parent, is_parent_remote, name, kind, .. } = span;
    let SpanRecord { start_ns, end_ns, is_error, attributes, links, .. } = span;
    let attributes = attributes.into_iter().map(|(attribute, value)| {
        let value: Value = match value {
            // A number of bytes, tokens or milliseconds is far below this limit.
            AttributeValue::Number(number) => i64::try_from(number).unwrap_or(i64::MAX).into(),
            AttributeValue::Word(word) => word.into(),
            AttributeValue::Text(text) => String::from(text).into(),
        };
        KeyValue::new(attribute.as_str(), value)
    });
    let mut span_links = SpanLinks::default();
    span_links.links = links.into_iter().map(|to| Link::new(context(to, true), Vec::new(), 0)).collect();
    SpanData {
        span_context: context(TraceContext { trace, span: id, is_sampled: true }, false),
        parent_span_id: parent.map_or(OtelSpanId::INVALID, span_id),
        parent_span_is_remote: is_parent_remote,
        span_kind: match kind {
            SpanKind::Internal => OtelKind::Internal,
            SpanKind::Server => OtelKind::Server,
            SpanKind::Client => OtelKind::Client,
        },
        name: name.text(),
        start_time: time(start_ns),
        end_time: time(end_ns),
        attributes: attributes.collect(),
        dropped_attributes_count: 0,
        events: Default::default(),
        links: span_links,
        status: if is_error { Status::error("") } else { Status::Unset },
        instrumentation_scope: scope.clone(),
    }
}

fn time(ns: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(ns)
}

fn span_id(id: SpanId) -> OtelSpanId {
    OtelSpanId::from_bytes(id.get().to_be_bytes())
}

/// The state of a client is not exported: it is text of the client.
fn context(context: TraceContext, is_remote: bool) -> SpanContext {
    let trace = OtelTraceId::from_bytes(context.trace.get().to_be_bytes());
    let flags = if context.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    SpanContext::new(trace, span_id(context.span), flags, is_remote, TraceState::NONE)
}
