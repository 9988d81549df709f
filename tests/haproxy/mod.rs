//! HAProxy with the configurations of docs/deploy/edge.md, in front of two gateways of a test.

use std::path::Path;

/// Returns `PATH` with the folders of administrators' programs, which are not in everyone's.
pub(crate) fn path() -> String {
    format!("{}:/usr/sbin:/usr/local/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

/// Returns the configuration below this heading of the documentation, with another listener and other gateways:
/// `HOST:PORT port PORT`, with the operations port.
pub(crate) fn configuration(heading: &str, listen: &str, gateways: &[String; 2]) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/deploy/edge.md");
    let page = std::fs::read_to_string(page).expect("the page exists");
    let (_, rest) = page.split_once(&format!("## {heading}\n")).expect("the page has the heading");
    let (_, rest) = rest.split_once("```haproxy\n").expect("the section has a configuration");
    let (configuration, _) = rest.split_once("```").expect("the block ends");
    let replace = |text: &str, from: &str, to: &str| {
        assert_eq!(text.matches(from).count(), 1, "{from} in {text}");
        text.replace(from, to)
    };
    let text = replace(configuration, "bind :8080", &format!("bind {listen}"));
    let text = replace(&text, " 10.0.0.1:8080 port 8081\n", &format!(" {}\n", gateways[0]));
    replace(&text, " 10.0.1.1:8080 port 8081\n", &format!(" {}\n", gateways[1]))
}
