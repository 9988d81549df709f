//! Client of the Hugging Face hub.
//!
//! `hf-hub` provides the hub's conventions: URLs of repositories, revisions and files. The listing is requested by
//! [`super::fetch`], because hf-hub follows redirects by rules of its own. Files are downloaded by [`super::download`], because
//! hf-hub's own download trusts only the roots compiled into it, resumes a partial without verifying its content, and keeps a
//! second cache.
//!
//! A revision is first resolved to its commit, and every file is downloaded at that commit, so that a branch that moves
//! during the pull does not mix two models. The listing has the SHA-256 of large files; of small ones (git blobs) it
//! has only the size, which is checked instead.

use std::path::PathBuf;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use url::Url;

use super::directory;
use super::error::PullError;
use super::fetch::{Fetcher, Remote};
use super::names;
use super::origin::RemoteFile;
use super::pypi::is_sha256;
use super::source::MAIN;
use crate::model::formats::Listing;

/// Environment variable that selects another hub.
pub(super) const SETTING: &str = "HF_ENDPOINT";

/// Advice for a host that does not respond as a hub.
pub(super) const HUB_ADVICE: &str = "check that HF_ENDPOINT names a model hub";

/// Repository at one commit.
pub(super) struct HubSnapshot {
    /// `owner/name`.
    repository: String,
    /// Commit.
    pub(super) commit: String,
    files: Vec<HubFile>,
}

struct HubFile {
    path: String,
    bytes: u64,
    sha256: Option<String>,
}

impl HubFile {
    /// Returns whether the file holds weights and has no digest to verify them.
    fn is_unverifiable(&self) -> bool {
        self.path.ends_with(".safetensors") && !self.sha256.as_deref().is_some_and(is_sha256)
    }
}

/// Response to `GET /api/models/{owner}/{name}/revision/{revision}?blobs=true`.
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

/// Client of the hub for one user.
pub(super) struct HubClient {
    api: Api,
    endpoint: Url,
    token: Option<String>,
}

impl HubClient {
    pub(super) fn new(endpoint: &Url, token: Option<&str>) -> Result<HubClient, PullError> {
        let api = ApiBuilder::from_cache(Cache::new(PathBuf::new()))
            .with_endpoint(endpoint.as_str().trim_end_matches('/').to_owned())
            .with_token(None)
            .with_progress(false)
            .build();
        let hub = |api| HubClient { api, endpoint: endpoint.clone(), token: token.map(str::to_owned) };
        api.map(hub).map_err(|error: ApiError| PullError::Unreadable {
            host: endpoint.to_string(),
            what: SETTING.to_owned(),
            reason: error.to_string(),
            advice: HUB_ADVICE,
        })
    }

    /// Lists the files of `owner/name` at a revision.
    pub(super) fn find(
        &self,
        owner: &str,
        name: &str,
        revision: Option<&str>,
    ) -> Result<HubSnapshot, PullError> {
        let repository = format!("{owner}/{name}");
        let revision = revision.unwrap_or(MAIN);
        let what = format!("model {repository} at {revision}");
        let repo = Repo::with_revision(repository.clone(), RepoType::Model, revision.to_owned());
        let url =
            format!("{}/api/{}?blobs=true", self.endpoint.as_str().trim_end_matches('/'), repo.api_url());
        let url = Url::parse(&url).map_err(|error| self.remote(&self.endpoint, &what).unreadable(error))?;
        let remote = self.remote(&url, &what);
        let text = Fetcher::new().page(remote, "application/json")?.text;
        let RepositoryV1 { sha, siblings } =
            serde_json::from_str(&text).map_err(|error| remote.unreadable(error))?;
        // The commit becomes the name of a folder.
        if sha.is_empty() || !sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(remote.unreadable("the commit is not a hexadecimal number"));
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
            .filter(|file| directory::is_model_file(&file.rfilename) && !file.rfilename.starts_with('.'))
            .map(|SiblingV1 { rfilename, size, lfs }| HubFile {
                path: rfilename,
                bytes: size,
                sha256: lfs.map(|file| file.sha256),
            })
            .collect();
        let names = names::check(files.iter().map(|file| file.path.as_str()));
        names.map_err(|problem| PullError::InvalidFiles { host: remote.host(), problem })?;
        if let Some(file) = files.iter().find(|file| file.is_unverifiable()) {
            return Err(PullError::NoDigest {
                host: remote.host(),
                what: format!("{repository}/{}", file.path),
            });
        }
        Ok(HubSnapshot { repository, commit: sha, files })
    }

    /// Returns the files of the snapshot with their URLs.
    pub(super) fn files(&self, snapshot: HubSnapshot) -> Vec<RemoteFile> {
        let HubSnapshot { repository, commit, files } = snapshot;
        let repo = self.api.repo(Repo::with_revision(repository, RepoType::Model, commit));
        let remote = |HubFile { path, bytes, sha256 }: HubFile| RemoteFile {
            location: repo.url(&path),
            path,
            bytes,
            sha256,
            etag: None, // the commit is the version
            has_ranges: true,
        };
        files.into_iter().map(remote).collect()
    }

    fn remote<'a>(&'a self, url: &'a Url, what: &'a str) -> Remote<'a> {
        Remote { url, what, sha256: None, token: self.token.as_deref(), setting: SETTING, advice: HUB_ADVICE }
    }
}
