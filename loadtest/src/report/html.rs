//! Report as one HTML page without external resources: plots and tables drawn from the embedded JSON.
//!
//! The page contains the report's JSON verbatim, and that of the drill on the page of a drill. Its script shows nothing
//! else except for the circumstances of the run ([`PageContext`]). So the numbers of the page and of `--json` cannot
//! differ, and the page also carries the data.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use regions::colour;
use serde::Serialize;

use super::Report;
use super::badges::{Badge, PlottedEvent, badges};
use crate::record::Mark;

const CSS: &str = include_str!("page.css");
const JS: &str = include_str!("page.js");

/// Width of the plots and their margins in the page's units.
const PLOT: Plot = Plot { width: 1080.0, left: 68.0, right: 16.0 };

/// Circumstances of a run, in the words of the page. They name no host, no user and no path.
#[derive(Clone, Debug, Serialize)]
pub struct PageContext {
    /// Date and time of the start, with the time zone.
    pub date: String,
    /// Version of the program.
    pub version: String,
    /// Processor and number of cores of the machine.
    pub machine: String,
}

#[derive(Clone, Copy, Serialize)]
struct Plot {
    width: f64,
    left: f64,
    right: f64,
}

/// Everything that the script needs besides the report and the drill.
#[derive(Serialize)]
struct PageV1<'a> {
    #[serde(flatten)]
    context: &'a PageContext,
    plot: Plot,
    /// Length of the time axis.
    seconds: u64,
    badges: Vec<BadgeV1>,
    /// Colours of the regions, as CSS values.
    colours: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct BadgeV1 {
    left: f64,
    width: f64,
    text: String,
    is_action: bool,
}

impl Report {
    /// Returns the report as one HTML file.
    pub fn to_html(&self, context: &PageContext) -> String {
        self.page(context, &self.to_json_line(), None)
    }

    /// Returns the page of a report, and of a drill if there is one; both are given as JSON.
    pub(crate) fn page(&self, context: &PageContext, report: &str, drill: Option<&str>) -> String {
        let (colours, rules) = self.colours();
        let seconds = self.axis_seconds();
        let page = PageV1 { context, plot: PLOT, seconds, badges: self.badges(seconds), colours };
        let page = serde_json::to_string(&page).expect("numbers, strings and lists serialise to JSON");
        // A region's name or a label must not close the script element.
        let [report, drill, page] =
            [report, drill.unwrap_or("null"), &page].map(|json| json.replace('<', "\\u003c"));
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>Load report</title>\n<style>\n{CSS}{rules}</style>\n<main id=\"page\"></main>\n\
             <script id=\"report\" type=\"application/json\">{report}</script>\n\
             <script id=\"drill\" type=\"application/json\">{drill}</script>\n\
             <script id=\"context\" type=\"application/json\">{page}</script>\n<script>\n{JS}</script>\n</html>\n"
        )
    }

    /// Returns the colour of each region as a CSS variable, and the rules that define these.
    fn colours(&self) -> (BTreeMap<String, String>, String) {
        let (mut colours, mut light, mut dark) = (BTreeMap::new(), String::new(), String::new());
        let regions = self.record.regions();
        let regions = regions.keys().flat_map(|served| served.regions());
        for region in regions {
            let number = colours.len();
            colours.entry(region.to_string()).or_insert_with(|| {
                let colour = colour::of(region);
                let _ = write!(light, " --region-{number}: {};", colour.light);
                let _ = write!(dark, " --region-{number}: {};", colour.dark);
                format!("var(--region-{number})")
            });
        }
        let rules =
            format!(":root {{{light} }}\n@media (prefers-color-scheme: dark) {{ :root {{{dark} }} }}\n");
        (colours, rules)
    }

    /// Returns the length of the time axis: the duration, and every second with a request.
    fn axis_seconds(&self) -> u64 {
        let duration = self.options.duration();
        let duration = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
        let last = self.record.seconds().keys().next_back().map_or(0, |last| last + 1);
        duration.max(last).max(1)
    }

    fn badges(&self, seconds: u64) -> Vec<BadgeV1> {
        let Plot { width, left, right } = PLOT;
        let x = |at: f64| left + at / seconds as f64 * (width - left - right);
        let event = |mark: &Mark| PlottedEvent { x: x(mark.at.as_secs_f64()), is_action: mark.is_action };
        let events: Vec<PlottedEvent> = self.marks.iter().map(event).collect();
        let badge = |Badge { left, width, text, is_action }| BadgeV1 { left, width, text, is_action };
        badges(&events, left, width - right).into_iter().map(badge).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::tests::report;
    use super::*;
    use serde_json::Value;

    pub(crate) fn context() -> PageContext {
        PageContext {
            date: "2026-11-26 12:00 UTC".to_owned(),
            version: "1.2.3".to_owned(),
            machine: "an abacus, 3 cores".to_owned(),
        }
    }

    /// Returns the JSON of a script element of a page.
    pub(crate) fn embedded(page: &str, id: &str) -> Value {
        let (_, after) = page.split_once(&format!("id=\"{id}\" type=\"application/json\">")).unwrap();
        serde_json::from_str(after.split_once("</script>").unwrap().0).unwrap()
    }

    #[test]
    fn the_page_contains_the_json_and_loads_no_external_resource() {
        let mut report = report();
        report.marks[0].label = "</script><b>".to_owned();
        let page = report.to_html(&context());
        assert_eq!(embedded(&page, "report"), serde_json::from_str::<Value>(&report.to_json()).unwrap());
        assert!(embedded(&page, "drill").is_null());
        assert_eq!(embedded(&page, "context")["machine"], "an abacus, 3 cores");
        let outside = page.replace("http://www.w3.org/2000/svg", "").replace("http://127.0.0.1:8080", "");
        for reference in ["http:", "https:", "src=", "@import", "url(", "fetch(", "<link"] {
            assert!(!outside.contains(reference), "{reference}");
        }
    }

    #[test]
    fn a_region_has_the_colour_of_its_name() {
        let page = report().to_html(&context());
        let colours = &embedded(&page, "context")["colours"];
        for region in ["gcp/europe-west4", "aws/us-east-1"] {
            let variable = colours[region].as_str().unwrap().trim_start_matches("var(").trim_end_matches(')');
            let colour = colour::of(&region.parse().unwrap());
            assert_eq!(page.matches(&format!("{variable}: {};", colour.light)).count(), 1, "{region}");
            assert_eq!(page.matches(&format!("{variable}: {};", colour.dark)).count(), 1, "{region}");
        }
    }

    #[test]
    fn the_time_axis_covers_the_schedule() {
        let page = report().to_html(&context());
        let context = embedded(&page, "context");
        assert_eq!(context["seconds"], 2);
        let badge = &context["badges"][0];
        assert_eq!((&badge["text"], &badge["is_action"]), (&"1".into(), &true.into()));
        let centre = badge["left"].as_f64().unwrap() + badge["width"].as_f64().unwrap() / 2.0;
        assert!((centre - (68.0 + (1080.0 - 84.0) / 2.0)).abs() < 0.01, "half of the axis: {centre}");
    }
}
