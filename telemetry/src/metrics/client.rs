//! Client of the exports of metrics. It has the connections, the headers and the timeout that the exporters of the other signals have,
//! and repeats nothing.

use crate::config::{CollectorConfig, ExportCompression, ExportProtocol, Signal};
use crate::connector::HttpExportClient;
use crate::exporter::{self, ExportError};
use crate::outcome::{LastOutcome, RejectedItems, error_text};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use prost::Message;
use std::io::{self, Write};
use std::time::Duration;
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;

/// Client of one collector.
pub(super) struct MetricsClient {
    transport: ExportTransport,
    timeout: Duration,
}

enum ExportTransport {
    Grpc { client: MetricsServiceClient<Channel>, metadata: MetadataMap },
    Http { client: Box<HttpExportClient>, endpoint: Uri, headers: HeaderMap, compression: ExportCompression },
}

impl MetricsClient {
    /// Creates a client, which connects with its first export; must be called in a runtime.
    pub(super) fn new(config: &CollectorConfig) -> Result<MetricsClient, ExportError> {
        let metadata = exporter::metadata(config);
        let CollectorConfig { endpoint, compression, timeout, .. } = config;
        let transport = match config.protocol {
            ExportProtocol::Grpc => {
                let client = MetricsServiceClient::new(exporter::collector_channel(config)?);
                let client = match compression {
                    ExportCompression::Gzip => client.send_compressed(CompressionEncoding::Gzip),
                    ExportCompression::None => client,
                };
                ExportTransport::Grpc { client, metadata }
            }
            ExportProtocol::Http => ExportTransport::Http {
                client: Box::new(exporter::http_client(config, &LastOutcome::default())?),
                endpoint: endpoint.clone(),
                headers: http_headers(metadata.into_headers(), *compression),
                compression: *compression,
            },
        };
        Ok(MetricsClient { transport, timeout: *timeout })
    }

    /// Sends an export, and returns the samples that the collector rejected. The error has the cause, without values of headers.
    pub(super) async fn send(
        &self,
        request: ExportMetricsServiceRequest,
    ) -> Result<Option<RejectedItems>, String> {
        let sent = async {
            match &self.transport {
                ExportTransport::Grpc { client, metadata } => {
                    send_by_grpc(client.clone(), metadata, request).await
                }
                ExportTransport::Http { client, endpoint, headers, compression } => {
                    let body = body(&request, *compression).map_err(|error| error_text(&error))?;
                    send_by_http(client, endpoint, headers, body).await
                }
            }
        };
        let timed_out = |_| Err(format!("no response within {:?}", self.timeout));
        tokio::time::timeout(self.timeout, sent).await.unwrap_or_else(timed_out)
    }
}

async fn send_by_grpc(
    mut client: MetricsServiceClient<Channel>,
    metadata: &MetadataMap,
    request: ExportMetricsServiceRequest,
) -> Result<Option<RejectedItems>, String> {
    let request = tonic::Request::from_parts(metadata.clone(), tonic::Extensions::default(), request);
    let response = client.export(request).await.map_err(|status| error_text(&status))?;
    Ok(RejectedItems::of_metrics(response.into_inner()))
}

async fn send_by_http(
    client: &HttpExportClient,
    endpoint: &Uri,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Option<RejectedItems>, String> {
    let mut request = Request::new(body);
    *request.method_mut() = Method::POST;
    *request.uri_mut() = endpoint.clone();
    *request.headers_mut() = headers.clone();
    let response = client.send(request).await.map_err(|error| error_text(error.as_ref()))?;
    if !response.status().is_success() {
        return Err(format!("the collector responded with status {}", response.status()));
    }
    Ok(RejectedItems::read(Signal::Metrics, response.body()))
}

/// Adds the headers that describe the body.
fn http_headers(mut headers: HeaderMap, compression: ExportCompression) -> HeaderMap {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
    if compression == ExportCompression::Gzip {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    headers
}

fn body(request: &ExportMetricsServiceRequest, compression: ExportCompression) -> io::Result<Bytes> {
    let message = request.encode_to_vec();
    match compression {
        ExportCompression::None => Ok(message.into()),
        ExportCompression::Gzip => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(&message)?;
            Ok(encoder.finish()?.into())
        }
    }
}
