//! `docs/errors.md`, rendered from the error codes.

use crate::api::Dialect;
use crate::error::ErrorCode;
use crate::tei;

/// Renders `docs/errors.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Errors\n\n\
         This page is rendered from the code by `replica/api/src/error_page.rs`; a test compares the two.\n\n\
         The code is in the header `x-meridian-error` on all paths. *Helps* is the remedy: nothing, wait (see `retry-after`), or \
         elsewhere, which is another region (the gateway retries there by itself, within the allowed regions).\n\n\
         The body has the format of the API that defines the path; [api.md](api.md) lists the paths:\n\n",
    );
    for dialect in Dialect::ALL {
        page.push_str(&format!("- {}\n", dialect.description()));
    }
    page.push_str(
        "\n\
         | code | status | at TEI's paths | fault | helps | meaning |\n|---|---|---|---|---|---|\n",
    );
    for code in ErrorCode::ALL {
        let (text, status, meaning) = (code.as_str(), code.status(), code.meaning().trim());
        let fault = format!("{:?}", code.fault()).to_lowercase();
        let remedy = format!("{:?}", code.remedy()).to_lowercase();
        let (tei_type, tei_status) = tei::error::type_and_status(*code);
        let tei = format!("{tei_status} `{tei_type:?}`");
        page.push_str(&format!("| `{text}` | {status} | {tei} | {fault} | {remedy} | {meaning} |\n"));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docs_errors_md_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors.md");
        let page = std::fs::read_to_string(path).expect("docs/errors.md");
        // The last section is rendered by `scheduler/api/src/error.rs`.
        let (clients, hub) = page.split_at(page.find("\n## Hub\n").unwrap_or(page.len()));
        if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
            std::fs::write(path, format!("{}{hub}", markdown())).expect("docs/errors.md is written");
            return;
        }
        assert_eq!(
            clients,
            markdown(),
            "docs/errors.md is out of date: run this test with MERIDIAN_WRITE_DOCS=1"
        );
    }
}
