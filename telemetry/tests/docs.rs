//! The table of attributes in `docs/tracing.md` is the one that the code renders.

use telemetry::span::attributes_table;

const BEGIN: &str = "<!-- attributes -->\n";
const END: &str = "<!-- end -->";

#[test]
fn docs_tracing_md_has_the_attributes_of_the_code() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/tracing.md");
    let page = std::fs::read_to_string(file).expect("the page");
    let (before, rest) = page.split_once(BEGIN).expect("the begin of the table");
    let (_, after) = rest.split_once(END).expect("its end");
    let rendered = format!("{before}{BEGIN}{}{END}{after}", attributes_table());
    if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
        std::fs::write(file, rendered).expect("the page can be written");
        return;
    }
    assert_eq!(page, rendered, "run with MERIDIAN_WRITE_DOCS=1");
}
