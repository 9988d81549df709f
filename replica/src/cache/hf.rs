//! Models on the Hugging Face hub.
//!
//! `hf-hub` knows where the hub keeps what: the endpoint, the caller's token, how a repository, a revision and a file
//! become a URL, and how a repository is listed. The bytes are brought by [`super::fetch`] like everybody's, because
//! hf-hub's own download trusts only the roots compiled into it, continues a partial without checking what it holds,
//! and keeps a second cache beside ours.
//!
//! A revision is first resolved to its commit, and every file is asked for at that commit, so a branch that moves
//! during the pull does not mix two models. Large files carry their SHA-256 in the listing; the small ones (git blobs)
//! carry only their size, which is checked instead.

use std::path::PathBuf;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use url::Url;

use super::directory;
use super::error::PullError;
use super::fetch::{self, Fetcher, Remote, reason};
use super::manifest::FileV1;
use super::pypi::is_sha256;
use super::source::MAIN;
use super::staging::Staging;
use crate::model::formats::Listing;

/// The variable that leads to another hub.
pub(super) const SETTING: &str = "HF_ENDPOINT";

/// A repository at one commit.
pub(super) struct Snapshot {
    /// `owner/name`.
    repository: String,
    /// The commit.
    pub(super) commit: String,
    files: Vec<HubFile>,
}

struct HubFile {
    path: String,
    bytes: u64,
    sha256: Option<String>,
}

impl HubFile {
    /// Whether it holds weights, and nobody could tell whether what arrives is what was published.
    fn is_unverifiable(&self) -> bool {
        self.path.ends_with(".safetensors") && !self.sha256.as_deref().is_some_and(is_sha256)
    }
}

/// The hub's answer to `GET /api/models/{owner}/{name}/revision/{revision}?blobs=true`.
#[derive(Deserialize)]
struct RepositoryV1 {
    sha: String,
    siblings: Vec<SiblingV1>,
}

#[derive(Deserialize)]
struct SiblingV1 {
    rfilename: String,
    size: u64,
    lfs: Option<LargeFileV1>,
}

#[derive(Deserialize)]
struct LargeFileV1 {
    sha256: String,
}

/// The hub, as one user sees it.
pub(super) struct Hub {
    api: Api,
    endpoint: Url,
    token: Option<String>,
}

impl Hub {
    pub(super) fn new(endpoint: &Url, token: Option<&str>) -> Result<Hub, PullError> {
        let api = ApiBuilder::from_cache(Cache::new(PathBuf::new()))
            .with_endpoint(endpoint.as_str().trim_end_matches('/').to_owned())
            .with_token(token.map(str::to_owned))
            .with_progress(false)
            .with_user_agent("meridian", env!("CARGO_PKG_VERSION"))
            .build();
        let hub = |api| Hub { api, endpoint: endpoint.clone(), token: token.map(str::to_owned) };
        api.map(hub).map_err(|error: ApiError| PullError::Unreadable {
            host: endpoint.to_string(),
            what: SETTING.to_owned(),
            reason: error.to_string(),
        })
    }

    /// Lists `owner/name` at a revision.
    pub(super) fn find(
        &self,
        owner: &str,
        name: &str,
        revision: Option<&str>,
    ) -> Result<Snapshot, PullError> {
        let repository = format!("{owner}/{name}");
        let revision = revision.unwrap_or(MAIN);
        let what = format!("model {repository} at {revision}");
        let remote = self.remote(&self.endpoint, &what);
        let repo = Repo::with_revision(repository.clone(), RepoType::Model, revision.to_owned());
        let request = self.api.repo(repo).info_request().query("blobs", "true");
        let request = request
            .config()
            .tls_config(fetch::tls())
            .timeout_resolve(Some(fetch::CONNECT_TIMEOUT))
            .timeout_connect(Some(fetch::CONNECT_TIMEOUT))
            .timeout_recv_response(Some(fetch::ANSWER_TIMEOUT))
            .timeout_per_read(Some(fetch::STALL_TIMEOUT))
            .http_status_as_error(false)
            .build();
        let mut response = request.call().map_err(|error| remote.unreachable(reason(error)))?;
        if !response.status().is_success() {
            return Err(remote.refused(response.status()));
        }
        let text = response.body_mut().read_to_string().map_err(|error| remote.unreadable(error))?;
        let RepositoryV1 { sha, siblings } =
            serde_json::from_str(&text).map_err(|error| remote.unreadable(error))?;
        // It becomes a folder's name.
        if sha.is_empty() || !sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(remote.unreadable("its commit is not a hexadecimal number"));
        }
        let listing = Listing {
            paths: siblings.iter().map(|file| file.rfilename.as_str()).collect(),
            name: Some(&repository),
            is_hub: true,
            read: &|_| None,
        };
        directory::check(&what, &listing)?;
        let files: Vec<HubFile> = siblings
            .into_iter()
            .filter(|file| directory::belongs(&file.rfilename) && !file.rfilename.starts_with('.'))
            .map(|SiblingV1 { rfilename, size, lfs }| HubFile {
                path: rfilename,
                bytes: size,
                sha256: lfs.map(|file| file.sha256),
            })
            .collect();
        if let Some(file) = files.iter().find(|file| file.is_unverifiable()) {
            return Err(PullError::NoDigest {
                host: remote.host(),
                what: format!("{repository}/{}", file.path),
            });
        }
        Ok(Snapshot { repository, commit: sha, files })
    }

    /// Brings every file of the snapshot into the staging folder.
    pub(super) fn download(
        &self,
        fetcher: &Fetcher,
        snapshot: &Snapshot,
        staging: &Staging,
        report: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<Vec<FileV1>, PullError> {
        let Snapshot { repository, commit, files } = snapshot;
        let repo = self.api.repo(Repo::with_revision(repository.clone(), RepoType::Model, commit.clone()));
        let total: u64 = files.iter().map(|file| file.bytes).sum();
        let mut before = 0;
        let mut arrived = Vec::new();
        for HubFile { path, bytes, sha256 } in files {
            let what = format!("{repository}/{path}");
            let url = repo.url(path);
            let url =
                Url::parse(&url).map_err(|error| self.remote(&self.endpoint, &what).unreadable(error))?;
            let remote =
                Remote { sha256: sha256.as_deref(), bytes: Some(*bytes), ..self.remote(&url, &what) };
            let file = fetcher
                .download(remote, staging.partials(), &mut |done, _| report(before + done, Some(total)))?;
            if file.bytes != *bytes {
                return Err(remote.unreadable(format!("it sent {} bytes instead of {bytes}", file.bytes)));
            }
            before += bytes;
            arrived.push((path, file));
        }
        let mut described = Vec::new();
        for (path, file) in arrived {
            staging.adopt(&file.path, path)?;
            described.push(FileV1 { path: path.clone(), bytes: file.bytes, sha256: file.sha256 });
        }
        Ok(described)
    }

    fn remote<'a>(&'a self, url: &'a Url, what: &'a str) -> Remote<'a> {
        Remote { url, what, sha256: None, bytes: None, token: self.token.as_deref(), setting: SETTING }
    }
}
