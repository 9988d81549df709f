//! Error codes of the hub that the client API does not have, as one closed list. `docs/errors.md` lists both.
//!
//! For all other errors the hub uses the codes of the client API, with the same meaning and status.

macro_rules! hub_error_codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal, $status:literal, $kind:literal;)+) => {
        /// Error code of the hub's own. The text form is part of the API: codes are added, never changed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum HubErrorCode {
            $($(#[doc = $doc])+ $name,)+
        }

        impl HubErrorCode {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [HubErrorCode] = &[$(HubErrorCode::$name,)+];

            /// Returns the code as clients see it, in `error.code` and in `x-meridian-error`.
            pub fn as_str(self) -> &'static str {
                match self { $(HubErrorCode::$name => $text,)+ }
            }

            /// Returns the HTTP status of this code.
            pub fn status(self) -> u16 {
                match self { $(HubErrorCode::$name => $status,)+ }
            }

            /// Returns the `type` of OpenAI's error object.
            pub fn openai_type(self) -> &'static str {
                match self { $(HubErrorCode::$name => $kind,)+ }
            }

            fn meaning(self) -> &'static str {
                match self { $(HubErrorCode::$name => concat!($($doc),+),)+ }
            }
        }
    };
}

hub_error_codes! {
    /// The role or the region of the peer may not send this request.
    Forbidden = "forbidden", 403, "permission_error";
    /// The files to apply are invalid; the body lists all problems.
    InvalidFiles = "invalid_files", 422, "invalid_request_error";
    /// The state does not permit the request: another writer has changed the same record, or a drill runs, or none does.
    Conflict = "conflict", 409, "invalid_request_error";
    /// The hub does not have the demand that a report changes; send the complete demand.
    UnknownBase = "unknown_base", 409, "invalid_request_error";
    /// Another spoke of the region has the same instance name.
    InstanceInUse = "instance_in_use", 409, "invalid_request_error";
    /// The lease has ended; register again.
    LeaseNotFound = "lease_not_found", 404, "invalid_request_error";
    /// The store is unavailable.
    StoreUnavailable = "store_unavailable", 503, "service_unavailable";
    /// A gateway cannot read its explanations of requests.
    ExplanationsUnavailable = "explanations_unavailable", 503, "service_unavailable";
    /// The local fleet of `meridian up`, which runs the drills, does not respond; the message has the reason.
    FleetUnavailable = "fleet_unavailable", 503, "service_unavailable";
}

/// Heading of the section of `docs/errors.md` that lists these codes, at its end.
pub const HEADING: &str = "## Hub\n";

/// Renders that section.
pub fn markdown() -> String {
    let mut page = format!(
        "{HEADING}\n\
         The hub's clients are gateways, spokes and operators. It uses codes of the table above with the same meaning and status, in \
         OpenAI's error object, and codes of its own (`scheduler/api/src/error.rs`):\n\n\
         | code | status | meaning |\n|---|---|---|\n"
    );
    for code in HubErrorCode::ALL {
        page.push_str(&format!("| `{}` | {} | {} |\n", code.as_str(), code.status(), code.meaning().trim()));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docs_errors_md_ends_with_the_codes_of_the_hub() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors.md");
        let page = std::fs::read_to_string(path).expect("docs/errors.md");
        let (clients, hub) = page.split_at(page.find(HEADING).unwrap_or(page.len()));
        if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
            std::fs::write(path, format!("{}\n\n{}", clients.trim_end(), markdown()))
                .expect("docs/errors.md is written");
            return;
        }
        assert_eq!(
            hub,
            markdown(),
            "docs/errors.md is out of date: run this test with MERIDIAN_WRITE_DOCS=1"
        );
    }
}
