//! Where models are pulled from and where they are kept, as the environment of the process says it.
//!
//! | variable | says | else |
//! |---|---|---|
//! | `MERIDIAN_PYPI_INDEX`, `PIP_INDEX_URL` | the Python package index | `https://pypi.org/simple` |
//! | `HF_ENDPOINT` | the Hugging Face hub | `https://huggingface.co` |
//! | `HF_TOKEN`, else the file that `hf auth login` writes | whom to be there | nobody |
//! | `MERIDIAN_CACHE`, `XDG_CACHE_HOME`, `HOME` | the cache: itself, the folder it is in, or `~/.cache` | |

use std::env;
use std::path::PathBuf;

use url::Url;

use super::error::PullError;

/// Where models are pulled from.
#[derive(Clone, PartialEq, Eq)]
pub struct Origins {
    /// The simple index of Python packages.
    pub pypi_index: Url,
    /// The Hugging Face hub.
    pub hf_endpoint: Url,
    /// Whom to be there; never logged.
    pub hf_token: Option<String>,
}

impl std::fmt::Debug for Origins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Origins { pypi_index, hf_endpoint, hf_token: _ } = self;
        let (index, hub) = (pypi_index.host_str(), hf_endpoint.host_str());
        f.debug_struct("Origins")
            .field("pypi_index", &index)
            .field("hf_endpoint", &hub)
            .finish_non_exhaustive()
    }
}

impl Origins {
    /// What the environment says.
    pub fn from_env() -> Result<Origins, PullError> {
        let index = ["MERIDIAN_PYPI_INDEX", "PIP_INDEX_URL"];
        Ok(Origins {
            pypi_index: url_from(&index, "https://pypi.org/simple")?,
            hf_endpoint: url_from(&["HF_ENDPOINT"], "https://huggingface.co")?,
            hf_token: set("HF_TOKEN").or_else(hf_token_file),
        })
    }
}

/// Where the cache is, unless somebody says otherwise; `None` for a user without a home.
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

fn url_from(variables: &[&'static str], otherwise: &str) -> Result<Url, PullError> {
    let Some((setting, given)) = variables.iter().find_map(|variable| Some((*variable, set(variable)?)))
    else {
        return Ok(Url::parse(otherwise).expect("a constant URL"));
    };
    match Url::parse(&given) {
        Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => Ok(url),
        Ok(_) | Err(_) => Err(PullError::BadSetting { setting }),
    }
}

/// The token that `hf auth login` keeps, in the folder of which hf-hub's cache is a part.
fn hf_token_file() -> Option<String> {
    let home = set("HF_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache/huggingface")))?;
    hf_hub::Cache::new(home.join("hub")).token()
}
