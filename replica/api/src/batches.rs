//! Files and batches: the paths of OpenAI's API of batches, which gateways serve and regions store.

/// Uploads, and the list of files.
pub const FILES: &str = "/v1/files";
/// A file.
pub const FILE: &str = "/v1/files/{id}";
/// Content of a file.
pub const FILE_CONTENT: &str = "/v1/files/{id}/content";
/// Creation, and the list of batches.
pub const BATCHES: &str = "/v1/batches";
/// A batch.
pub const BATCH: &str = "/v1/batches/{id}";
/// Cancellation of a batch.
pub const BATCH_CANCEL: &str = "/v1/batches/{id}/cancel";

/// Longest body of the creation of a batch, bytes: three names, and 16 pairs of metadata.
pub const BATCH_BODY_BYTES_MAX: usize = 64 << 10;

/// Methods and paths, in the order of the documentation.
pub const BATCH_ENDPOINTS: [(&str, &str); 9] = [
    ("POST", FILES),
    ("GET", FILES),
    ("GET", FILE),
    ("DELETE", FILE),
    ("GET", FILE_CONTENT),
    ("POST", BATCHES),
    ("GET", BATCHES),
    ("GET", BATCH),
    ("POST", BATCH_CANCEL),
];

/// Request about files or batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchCall<'a> {
    /// Stores a file.
    Upload,
    /// Lists files.
    Files,
    /// Returns a file without its content.
    File(&'a str),
    /// Returns the content of a file.
    FileContent(&'a str),
    /// Deletes a file.
    DeleteFile(&'a str),
    /// Creates a batch.
    Create,
    /// Lists batches.
    Batches,
    /// Returns a batch.
    Batch(&'a str),
    /// Cancels a batch.
    Cancel(&'a str),
}

/// Reason why a path below those of files and batches is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoBatchCall {
    /// No such path.
    Path,
    /// The path has other methods.
    Method(&'static str),
}

impl<'a> BatchCall<'a> {
    /// Returns the request of a method and a path; none if it is a path of another API.
    pub fn of(method: &str, path: &'a str) -> Option<Result<BatchCall<'a>, NoBatchCall>> {
        let below =
            |prefix| path.strip_prefix(prefix).filter(|rest: &&str| rest.is_empty() || rest.starts_with('/'));
        let is_id = |id: &str| !id.is_empty() && !id.contains('/');
        if let Some(rest) = below(FILES) {
            let call = match (method, rest.strip_prefix('/')) {
                ("POST", None) => Ok(BatchCall::Upload),
                ("GET", None) => Ok(BatchCall::Files),
                (_, None) => Err(NoBatchCall::Method("POST, GET")),
                (method, Some(id)) => match (method, id.strip_suffix("/content").unwrap_or(id), id) {
                    (_, id, _) if !is_id(id) => Err(NoBatchCall::Path),
                    ("GET", id, whole) if id == whole => Ok(BatchCall::File(id)),
                    ("DELETE", id, whole) if id == whole => Ok(BatchCall::DeleteFile(id)),
                    (_, id, whole) if id == whole => Err(NoBatchCall::Method("GET, DELETE")),
                    ("GET", id, _) => Ok(BatchCall::FileContent(id)),
                    _ => Err(NoBatchCall::Method("GET")),
                },
            };
            return Some(call);
        }
        let call = match (method, below(BATCHES)?.strip_prefix('/')) {
            ("POST", None) => Ok(BatchCall::Create),
            ("GET", None) => Ok(BatchCall::Batches),
            (_, None) => Err(NoBatchCall::Method("POST, GET")),
            (method, Some(id)) => match (method, id.strip_suffix("/cancel").unwrap_or(id), id) {
                (_, id, _) if !is_id(id) => Err(NoBatchCall::Path),
                ("GET", id, whole) if id == whole => Ok(BatchCall::Batch(id)),
                (_, id, whole) if id == whole => Err(NoBatchCall::Method("GET")),
                ("POST", id, _) => Ok(BatchCall::Cancel(id)),
                _ => Err(NoBatchCall::Method("POST")),
            },
        };
        Some(call)
    }

    /// Returns the path, as in [`BATCH_ENDPOINTS`].
    pub const fn path(&self) -> &'static str {
        match self {
            BatchCall::Upload | BatchCall::Files => FILES,
            BatchCall::File(_) | BatchCall::DeleteFile(_) => FILE,
            BatchCall::FileContent(_) => FILE_CONTENT,
            BatchCall::Create | BatchCall::Batches => BATCHES,
            BatchCall::Batch(_) => BATCH,
            BatchCall::Cancel(_) => BATCH_CANCEL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_is_a_call_and_other_methods_and_paths_are_not() {
        for (method, path) in BATCH_ENDPOINTS {
            let call = BatchCall::of(method, path).unwrap().unwrap();
            assert_eq!(call.path(), path, "{method}");
        }
        for (method, path, expected) in [
            ("GET", "/v1/files/file-1", Some(Ok(BatchCall::File("file-1")))),
            ("GET", "/v1/files/file-1/content", Some(Ok(BatchCall::FileContent("file-1")))),
            ("POST", "/v1/batches/b/cancel", Some(Ok(BatchCall::Cancel("b")))),
            ("GET", "/v1/batches/b/cancel", Some(Err(NoBatchCall::Method("POST")))),
            ("DELETE", "/v1/batches/b", Some(Err(NoBatchCall::Method("GET")))),
            ("DELETE", "/v1/files", Some(Err(NoBatchCall::Method("POST, GET")))),
            ("POST", "/v1/files/a", Some(Err(NoBatchCall::Method("GET, DELETE")))),
            ("POST", "/v1/files/a/content", Some(Err(NoBatchCall::Method("GET")))),
            ("GET", "/v1/files/", Some(Err(NoBatchCall::Path))),
            ("GET", "/v1/files/a/b", Some(Err(NoBatchCall::Path))),
            ("GET", "/v1/filesx", None),
            ("GET", "/v1/embeddings", None),
        ] {
            assert_eq!(BatchCall::of(method, path), expected, "{method} {path}");
        }
    }
}
