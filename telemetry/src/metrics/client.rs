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
use std::error::Error;
use std::io::{self, Write};
use std::time::Duration;
use supervision::task::blocking;
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;

/// Client of one collector.
pub(super) struct MetricsClient {
    transport: ExportTransport,
    timeout: Duration,
}

/// Error of one message of an export, with its cause; without values of headers.
#[derive(Debug)]
pub(super) enum SendError {
    /// The collector responded with an error. It may accept another message.
    Rejected(String),
    /// There was no connection, or no response in time.
    NoResponse(String),
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

    /// Sends a message, and returns the samples that the collector rejected.
    pub(super) async fn send(
        &self,
        request: ExportMetricsServiceRequest,
    ) -> Result<Option<RejectedItems>, SendError> {
        let sent = async {
            match &self.transport {
                ExportTransport::Grpc { client, metadata } => {
                    send_by_grpc(client.clone(), metadata, request).await
                }
                ExportTransport::Http { client, endpoint, headers, compression } => {
                    let compression = *compression;
                    // A message has up to 3 MiB, which would delay the other tasks of the thread.
                    let body = blocking(move || body(&request, compression)).await;
                    let body = body.map_err(|error| SendError::Rejected(error_text(&error)))?;
                    send_by_http(client, endpoint, headers, body).await
                }
            }
        };
        let timed_out = |_| Err(SendError::NoResponse(format!("no response within {:?}", self.timeout)));
        tokio::time::timeout(self.timeout, sent).await.unwrap_or_else(timed_out)
    }
}

async fn send_by_grpc(
    mut client: MetricsServiceClient<Channel>,
    metadata: &MetadataMap,
    request: ExportMetricsServiceRequest,
) -> Result<Option<RejectedItems>, SendError> {
    let request = tonic::Request::from_parts(metadata.clone(), tonic::Extensions::default(), request);
    let response = client.export(request).await.map_err(|status| {
        let text = error_text(&status);
        // A status of the collector has no source; that of an error of the connection has.
        if status.source().is_none() { SendError::Rejected(text) } else { SendError::NoResponse(text) }
    })?;
    Ok(RejectedItems::of_metrics(response.into_inner()))
}

async fn send_by_http(
    client: &HttpExportClient,
    endpoint: &Uri,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Option<RejectedItems>, SendError> {
    let mut request = Request::new(body);
    *request.method_mut() = Method::POST;
    *request.uri_mut() = endpoint.clone();
    *request.headers_mut() = headers.clone();
    let sent = client.send(request).await;
    let response = sent.map_err(|error| SendError::NoResponse(error_text(error.as_ref())))?;
    if !response.status().is_success() {
        let status = response.status();
        return Err(SendError::Rejected(format!("the collector responded with status {status}")));
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
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&message)?;
            Ok(encoder.finish()?.into())
        }
    }
}
