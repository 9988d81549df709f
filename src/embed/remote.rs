//! Backend of `meridian embed` at an endpoint, by the bulk client of `loadtest`.
//!
//! A server rejects a whole request because of one input. To find that input, a rejected window is divided in halves, and
//! each half is sent again with full concurrency. A first request with a text of our own distinguishes an endpoint that
//! rejects everything (a wrong deployment, a model that does not embed) from one that rejects a text.

use embed::backend::{BackendError, EmbeddingBackend, RejectedText, WindowVectors};
use loadtest::client::split::RequestLimits;
use loadtest::client::{
    Client, ClientError, ClientSettings, EmbedOptions, EmbeddedVectors, EndpointSettings, HttpAttemptError,
    Preference,
};
use replica_api::headers::{MODEL_REVISION, PRIORITY};
use std::collections::BTreeMap;
use std::path::Path;
use tokio::runtime::Handle;

/// Text of the first request.
const PROBE: &str = "probe";

/// Settings of an endpoint.
pub(super) struct RemoteOptions<'a> {
    pub(super) url: &'a str,
    pub(super) key: Option<&'a str>,
    pub(super) cacert: Option<&'a Path>,
    pub(super) model: &'a str,
    pub(super) inputs: usize,
    pub(super) concurrency: usize,
    pub(super) dimensions: Option<u64>,
    pub(super) truncate: bool,
    pub(super) skip_invalid: bool,
}

/// Client of one deployment.
pub(super) struct RemoteBackend {
    runtime: Handle,
    client: Client,
    options: EmbedOptions,
    preference: Preference,
    dimension: usize,
    /// Revision of the model, if the server states it.
    revision: Option<String>,
    skip_invalid: bool,
}

impl RemoteBackend {
    /// Sends a first request. Also returns the options that decide the result.
    pub(super) fn connect(
        runtime: Handle,
        options: &RemoteOptions<'_>,
    ) -> Result<(RemoteBackend, BTreeMap<String, String>), String> {
        let RemoteOptions {
            url,
            key,
            cacert,
            model,
            inputs,
            concurrency,
            dimensions,
            truncate,
            skip_invalid,
        } = *options;
        let roots_pem = cacert
            .map(|path| std::fs::read(path).map_err(|error| format!("--cacert {}: {error}", path.display())))
            .transpose()?;
        let endpoints = vec![EndpointSettings::new(url, key)];
        let client = Client::new(&ClientSettings { endpoints, roots_pem, ..ClientSettings::default() });
        let client = client.map_err(|error| error.to_string())?;
        let dimensions = dimensions.map(|dimensions| usize::try_from(dimensions).unwrap_or(usize::MAX));
        let defaults = Preference::default();
        let mut backend = RemoteBackend {
            runtime,
            client,
            options: EmbedOptions {
                model: model.to_owned(),
                dimensions,
                truncate,
                ..EmbedOptions::default()
            },
            preference: Preference {
                request: RequestLimits { texts: inputs, ..defaults.request },
                in_flight_max: concurrency,
                headers: vec![(PRIORITY.to_owned(), "bulk".to_owned())],
                ..defaults
            },
            dimension: 0,
            revision: None,
            skip_invalid,
        };
        let first = backend.request(&[PROBE]).map_err(|error| format!("{url}: {error}"))?;
        backend.dimension = first.dimensions;
        backend.revision = revisions(&first).next().map(str::to_owned);
        let mut settings = BTreeMap::from([
            ("--model".to_owned(), model.to_owned()),
            ("--dimensions".to_owned(), first.dimensions.to_string()),
        ]);
        // A revision identifies the model at every endpoint. Without one, another endpoint may have another model.
        match &backend.revision {
            Some(revision) => settings.insert("model revision".to_owned(), revision.clone()),
            None => settings.insert("--url".to_owned(), url.to_owned()),
        };
        Ok((backend, settings))
    }

    fn request(&self, texts: &[&str]) -> Result<EmbeddedVectors, ClientError> {
        let mut ignore_progress = |_| ();
        let embed = self.client.embed(texts, &self.options, &self.preference, &mut ignore_progress);
        self.runtime.block_on(embed)
    }

    /// Embeds consecutive texts of a window, the first of which has the index `first`.
    fn embed_part(
        &self,
        texts: &[&str],
        first: usize,
        vectors: &mut WindowVectors,
    ) -> Result<(), BackendError> {
        match self.request(texts) {
            Ok(embedded) => {
                self.check(&embedded)?;
                vectors.values.extend_from_slice(&embedded.values);
                Ok(())
            }
            Err(ClientError::Failed {
                failure: HttpAttemptError::ErrorStatus { status, message, .. },
                ..
            }) if is_rejection(status) => {
                if let [_] = texts {
                    let reason = format!("the server rejects the text: {}", stated(&message));
                    vectors.rejected.push(RejectedText { index: first, reason });
                    return Ok(());
                }
                let (left, right) = texts.split_at(texts.len() / 2);
                self.embed_part(left, first, vectors)?;
                if !vectors.rejected.is_empty() && !self.skip_invalid {
                    return Ok(());
                }
                self.embed_part(right, first + left.len(), vectors)
            }
            Err(error) => Err(BackendError(error.to_string())),
        }
    }

    /// Checks that all requests were computed by the same model.
    fn check(&self, embedded: &EmbeddedVectors) -> Result<(), BackendError> {
        let (expected, found) = (self.dimension, embedded.dimensions);
        if found != expected {
            return Err(BackendError(format!("vectors have {found} values, and had {expected} before")));
        }
        match revisions(embedded).find(|revision| Some(*revision) != self.revision.as_deref()) {
            Some(other) => Err(BackendError(format!(
                "the revision of the model changed from {} to {other} during the run; give --restart to compute all rows \
                 with one model",
                self.revision.as_deref().unwrap_or("none")
            ))),
            None => Ok(()),
        }
    }
}

impl EmbeddingBackend for RemoteBackend {
    fn embed(&mut self, texts: &[&str]) -> Result<WindowVectors, BackendError> {
        let mut vectors = WindowVectors::default();
        self.embed_part(texts, 0, &mut vectors)?;
        Ok(vectors)
    }

    fn dimension(&self) -> usize {
        self.dimension
    }
}

/// Returns the revisions of the model in the responses.
fn revisions(embedded: &EmbeddedVectors) -> impl Iterator<Item = &str> {
    let headers = embedded.run.requests.iter().flat_map(|request| request.headers.iter());
    headers.filter(|(name, _)| *name == MODEL_REVISION).map(|(_, value)| value)
}

/// Returns whether a status means that an input, or the size of the request, is at fault.
fn is_rejection(status: u16) -> bool {
    matches!(status, 400 | 413 | 422)
}

/// Returns the message of an error body, or the body if it has another format.
fn stated(body: &str) -> String {
    let parsed: Option<serde_json::Value> = serde_json::from_str(body).ok();
    let message = parsed.as_ref().and_then(|body| body.pointer("/error/message")?.as_str());
    message.unwrap_or(body).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_an_error_body_is_shown() {
        assert_eq!(stated("{\"error\": {\"message\": \"`input[0]` is empty\"}}"), "`input[0]` is empty");
        assert_eq!(stated("bad request\n"), "bad request");
        assert_eq!(stated("{\"error\": \"x\"}"), "{\"error\": \"x\"}");
    }
}
