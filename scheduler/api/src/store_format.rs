//! Format of the hub's store, by which an older hub recognises the store of a newer one.

use serde::{Deserialize, Serialize};

/// Format of the records that this version reads and writes. It is raised with a change that a hub of the version before would lose or
/// misread; a field that such a hub may ignore raises nothing.
pub const STORE_FORMAT: u32 = 1;

/// Record `meta/format`. All versions read these two fields, so it has no version of its own, and unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFormat {
    /// Format of the records. A store without this record has format 1.
    pub format: u32,
    /// Version of the hub that wrote this format first, such as `0.1.0`.
    pub written_by: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_of_a_later_version_is_read() {
        let later = r#"{"format":7,"written_by":"3.0.0","migrated":["a"]}"#;
        let read: StoreFormat = serde_json::from_str(later).unwrap();
        assert_eq!(read, StoreFormat { format: 7, written_by: "3.0.0".to_owned() });
    }
}
