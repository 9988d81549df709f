//! Files of the page, which are compiled in: the page needs no other host.

/// File of the page.
#[derive(Clone, Copy, Debug)]
pub struct Asset {
    /// Path at the console.
    pub path: &'static str,
    /// Value of `content-type`.
    pub content_type: &'static str,
    /// Content.
    pub body: &'static [u8],
}

/// Maximum size of all files together, so that the page loads at once over a slow connection.
pub const BYTES_MAX: usize = 300_000;

/// Value of `content-security-policy`: the page loads its own files, and talks to the console only.
pub const SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                                   img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

macro_rules! assets {
    ($($path:literal, $file:literal, $content_type:expr;)+) => {
        /// All files.
        pub const ASSETS: &[Asset] =
            &[$(Asset { path: $path, content_type: $content_type, body: include_bytes!(concat!("../assets/", $file)) }),+];
    };
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";

assets! {
    "/", "index.html", HTML;
    "/console.css", "console.css", STYLE;
    "/icon.svg", "icon.svg", SVG;
    "/main.js", "main.js", SCRIPT;
    "/dom.js", "dom.js", SCRIPT;
    "/map.js", "map.js", SCRIPT;
    "/labels.js", "labels.js", SCRIPT;
    "/zones.js", "zones.js", SCRIPT;
    "/land.js", "land.js", SCRIPT;
    "/charts.js", "charts.js", SCRIPT;
    "/pages.js", "pages.js", SCRIPT;
    "/requests.js", "requests.js", SCRIPT;
    "/waterfall.js", "waterfall.js", SCRIPT;
    "/drills.js", "drills.js", SCRIPT;
}

/// Returns the file at this path.
pub fn find(path: &str) -> Option<&'static Asset> {
    ASSETS.iter().find(|asset| asset.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_small_and_names_no_other_host() {
        let bytes: usize = ASSETS.iter().map(|asset| asset.body.len()).sum();
        assert!(bytes < BYTES_MAX, "{bytes} bytes");
        for asset in ASSETS {
            let text = std::str::from_utf8(asset.body).unwrap();
            // A namespace is a name, and is not fetched.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!text.contains("http://") && !text.contains("https://"), "{}", asset.path);
        }
    }

    #[test]
    fn the_page_has_no_inline_script_or_style_which_its_policy_forbids() {
        let page = std::str::from_utf8(find("/").unwrap().body).unwrap();
        for part in ["style=", "<style", "onclick", "onload", "javascript:"] {
            assert!(!page.contains(part), "{part}");
        }
        assert_eq!(page.matches("<script").count(), page.matches("<script type=\"module\" src=").count());
    }

    #[test]
    fn every_file_that_a_script_imports_is_served() {
        for asset in ASSETS.iter().filter(|asset| asset.content_type == SCRIPT) {
            let text = std::str::from_utf8(asset.body).unwrap();
            for import in text.split("from \"./").skip(1) {
                let file = import.split('"').next().unwrap();
                assert!(find(&format!("/{file}")).is_some(), "{} imports {file}", asset.path);
            }
        }
    }
}
