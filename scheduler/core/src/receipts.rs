//! Keys of `[receipts]`, which gateways and spokes have in common. `gateway::receipts` validates them further.

use std::path::PathBuf;

configuration::section! {
    /// Receipts of attempts, with which an auditor can verify where every request was sent.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct ReceiptsSection {
        /// Directory of their files.
        pub dir: PathBuf, like "\"receipts\"";
        /// File with the key of the tenants' pseudonyms, 16 bytes or more, one for the whole fleet.
        pub key_file: Option<PathBuf>;
        /// Environment variable with that key, instead of the file.
        pub key_env: Option<String>;
        /// Whether requests of deployments with a residency policy are rejected while receipts cannot be written.
        pub required: bool = false;
    }
}
