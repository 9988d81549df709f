//! The cases, by family.

mod auth;
mod bodies;
mod chunks;
mod fields;
mod framing;
mod h2_floods;
mod h2_frames;
mod h2_headers;
mod limits;
mod lines;
mod pace;
mod targets;

use crate::case::Case;

/// All of them.
pub(crate) fn all() -> Vec<Case> {
    let families = [
        lines::cases(),
        targets::cases(),
        fields::cases(),
        framing::cases(),
        chunks::cases(),
        auth::cases(),
        limits::cases(),
        bodies::cases(),
        pace::cases(),
        h2_frames::cases(),
        h2_headers::cases(),
        h2_floods::cases(),
    ];
    families.concat()
}

/// Formats bytes for the name of a case.
fn shown(bytes: impl AsRef<[u8]>) -> String {
    let bytes = bytes.as_ref();
    format!("{} ({} bytes)", bytes[..bytes.len().min(60)].escape_ascii(), bytes.len())
}
