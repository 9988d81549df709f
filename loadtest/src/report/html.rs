//! Report as one HTML page without external resources: plots and tables drawn from the embedded JSON.
//!
//! The page contains the report's JSON verbatim, and its script shows nothing else. So the numbers of the page and of
//! `--json` cannot differ, and the page also carries the data.

use super::Report;

const CSS: &str = include_str!("page.css");
const JS: &str = include_str!("page.js");

impl Report {
    /// The report as one HTML file.
    pub fn to_html(&self) -> String {
        // A region's name or a label must not close the script element.
        let json = self.to_json_line().replace('<', "\\u003c");
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>Load report</title>\n<style>\n{CSS}</style>\n<main id=\"page\"></main>\n\
             <script id=\"report\" type=\"application/json\">{json}</script>\n<script>\n{JS}</script>\n</html>\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use serde_json::Value;

    #[test]
    fn the_page_contains_the_json_and_loads_no_external_resource() {
        let mut report = report();
        report.marks[0].label = "</script><b>".to_owned();
        let page = report.to_html();
        let (_, after) = page.split_once("type=\"application/json\">").unwrap();
        let (json, _) = after.split_once("</script>").unwrap();
        let json: Value = serde_json::from_str(json).unwrap();
        assert_eq!(json, serde_json::from_str::<Value>(&report.to_json()).unwrap());
        let outside = page.replace("http://www.w3.org/2000/svg", "").replace("http://127.0.0.1:8080", "");
        for reference in ["http:", "https:", "src=", "@import", "url(", "fetch(", "<link"] {
            assert!(!outside.contains(reference), "{reference}");
        }
    }
}
