//! API description: `GET /openapi.json` (OpenAPI 3.1) and `docs/api.md`.
//!
//! Both are rendered from the definitions that the code uses: the paths, fields,
//! headers, errors and limits of `replica_api`. Tests verify that the description and the served API agree.

use gateway_core::request_options::TIMEOUT_MAX;
use gateway_core::scatter::INPUTS_MAX;

use replica_api::api::{
    ApiOperation, Dialect, Header, JOB_HEADERS, ModelField, OPERATIONS, REQUEST_HEADERS, RESPONSE_HEADERS,
    limits,
};
use replica_api::batches::{BATCH, BATCH_CANCEL, BATCHES, FILE, FILE_CONTENT, FILES};
use replica_api::body::{BodySchema, Field, FieldKind};
use replica_api::error::ErrorCode;
use replica_api::jobs::{JOBS, JobKind};
use replica_api::{headers, paths};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// Returns the body of `GET /openapi.json`.
pub fn document() -> &'static [u8] {
    static DOCUMENT: LazyLock<Vec<u8>> =
        LazyLock::new(|| serde_json::to_vec(&render()).expect("strings and numbers serialize"));
    &DOCUMENT
}

fn render() -> Value {
    let mut paths = Map::new();
    for operation in OPERATIONS {
        let mut described = json!({operation.method.to_lowercase(): computed(operation)});
        if operation.path == "/" {
            described["servers"] = json!([deployment_server()]);
        }
        paths.insert(operation.public_path().into_owned(), described);
    }
    for (path, summary, example) in AT_THE_EDGE {
        paths.insert((*path).to_owned(), json!({"get": local(path, summary, example)}));
    }
    for kind in JobKind::ALL {
        paths.insert(kind.path().to_owned(), json!({"post": submitted(kind)}));
    }
    for call in BATCH_CALLS {
        let path = paths.entry(call.path.to_owned()).or_insert_with(|| json!({}));
        path[call.method.to_lowercase()] = call.describe();
    }
    let mut cancel = local(JOB, JOB_CANCELLED, &job("cancelled"));
    cancel["operationId"] = json!("cancel_v1_async_id");
    paths[JOB]["delete"] = cancel;
    let mut resend = local(JOB_WEBHOOK, JOB_RESENT, &job("succeeded"));
    resend["operationId"] = json!("resend_v1_async_id_webhook");
    let accepted = resend["responses"]["200"].take();
    resend["responses"] = json!({"202": accepted, "default": resend["responses"]["default"]});
    paths.insert(JOB_WEBHOOK.to_owned(), json!({"post": resend}));
    let header = |(name, description): &Header| {
        ((*name).to_owned(), json!({"description": description, "schema": {"type": "string"}}))
    };
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Meridian",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "One endpoint for embedding, rerank and classification models. `model` names a deployment. \
                Unknown fields are ignored; a field that would change the result and is not supported is rejected by name.",
        },
        "servers": [{"url": "/"}, deployment_server()],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                (headers::API_KEY): {"type": "apiKey", "in": "header", "name": headers::API_KEY},
                (headers::X_API_KEY): {"type": "apiKey", "in": "header", "name": headers::X_API_KEY},
            },
            "headers": RESPONSE_HEADERS.iter().map(header).collect::<Map<_, _>>(),
            "parameters": REQUEST_HEADERS.iter().chain(JOB_HEADERS).map(parameter).collect::<Map<_, _>>(),
            "responses": error_responses(),
            "schemas": errors(),
        },
        "security": [{"bearer": []}, {(headers::API_KEY): []}, {(headers::X_API_KEY): []}],
        "x-limits": limits().into_iter().map(|(name, value, _)| (name.to_owned(), value.into())).collect::<Map<_, _>>(),
    })
}

/// Endpoints that the gateway serves itself.
const AT_THE_EDGE: &[(&str, &str, &str)] = &[
    (
        paths::MODELS,
        "The deployments that this key may use.",
        r#"{"object":"list","data":[{"id":"minilm","object":"model","created":0,"owned_by":"meridian"}]}"#,
    ),
    (
        paths::MODEL,
        "One deployment.",
        r#"{"id":"minilm","object":"model","created":0,"owned_by":"meridian"}"#,
    ),
    (
        paths::INFINITY_MODELS,
        "The deployments that this key may use, as Infinity's client reads them.",
        r#"{"object":"list","data":[{"id":"minilm","object":"model","created":0,"owned_by":"infinity","stats":{},"backend":"meridian"}]}"#,
    ),
    (paths::OPENAPI, "This document; no key is needed.", r#"{"openapi":"3.1.0"}"#),
    (
        JOBS,
        "The jobs of this tenant, the newest first, without results (docs/jobs.md). Parameters: `status`, `created_after` in \
         seconds since 1970, `limit` from 1 to 100, and `after`, the id of the last job of the page before.",
        r#"{"object":"list","data":[],"has_more":false}"#,
    ),
    (
        JOB,
        "A job with its status, and its result if it has one.",
        r#"{"id":"job_01kaxk3v9y8r2m4n6p7q8s9t0v.gcp.europe-west4","object":"job","status":"succeeded","result":{}}"#,
    ),
];
/// Request about files or batches.
struct BatchCallDocs {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    example: &'static str,
    /// Content type and schema of the body.
    body: Option<(&'static str, &'static str)>,
}

impl BatchCallDocs {
    fn describe(&self) -> Value {
        let BatchCallDocs { method, path, summary, example, body } = self;
        let mut described = local(path, summary, example);
        described["operationId"] = json!(format!("{}_{}", method.to_lowercase(), operation_id(path)));
        described["tags"] = json!(["OpenAI"]);
        if let Some((content_type, schema)) = body {
            let schema: Value = serde_json::from_str(schema).unwrap_or_default();
            described["requestBody"] =
                json!({"required": true, "content": {*content_type: {"schema": schema}}});
        }
        described
    }
}

const FILE_EXAMPLE: &str = r#"{"id":"file-01kaxk3v9y8r2m4n6p7q8s9t0v.gcp.europe-west4","object":"file","bytes":120,"created_at":1764108826,"expires_at":1764713626,"filename":"batch.jsonl","purpose":"batch","status":"processed","status_details":null}"#;
const BATCH_EXAMPLE: &str = r#"{"id":"batch_01kaxk3v9y8r2m4n6p7q8s9t0v.gcp.europe-west4","object":"batch","endpoint":"/v1/embeddings","input_file_id":"file-01kaxk3v9y8r2m4n6p7q8s9t0v.gcp.europe-west4","completion_window":"24h","status":"in_progress","output_file_id":null,"error_file_id":null,"created_at":1764108826,"request_counts":{"total":2,"completed":1,"failed":0},"metadata":{}}"#;
const LIST_EXAMPLE: &str = r#"{"object":"list","data":[],"first_id":null,"last_id":null,"has_more":false}"#;

/// Requests about files and batches, in the order of the documentation.
const BATCH_CALLS: [BatchCallDocs; 9] = [
    BatchCallDocs {
        method: "POST",
        path: FILES,
        summary: "Stores a file for a batch (docs/jobs.md): the form has `purpose`, which is `batch`, and `file`, with one request \
                  on each line.",
        example: FILE_EXAMPLE,
        body: Some((
            "multipart/form-data",
            r#"{"type":"object","properties":{"purpose":{"type":"string","enum":["batch"]},"file":{"type":"string","format":"binary"}},"required":["purpose","file"]}"#,
        )),
    },
    BatchCallDocs {
        method: "GET",
        path: FILES,
        summary: "The files of this tenant, the newest first, with those that its batches have written. Parameters: `purpose` \
                  (`batch` or `batch_output`), `limit` from 1 to 10000, and `after`, the id of the last file of the page before.",
        example: LIST_EXAMPLE,
        body: None,
    },
    BatchCallDocs {
        method: "GET",
        path: FILE,
        summary: "A file without its content.",
        example: FILE_EXAMPLE,
        body: None,
    },
    BatchCallDocs {
        method: "DELETE",
        path: FILE,
        summary: "Deletes a file that no unfinished batch reads.",
        example: r#"{"id":"file-01kaxk3v9y8r2m4n6p7q8s9t0v.gcp.europe-west4","object":"file","deleted":true}"#,
        body: None,
    },
    BatchCallDocs {
        method: "GET",
        path: FILE_CONTENT,
        summary: "The content of a file: lines of JSON.",
        example: "{}",
        body: None,
    },
    BatchCallDocs {
        method: "POST",
        path: BATCHES,
        summary: "Computes the requests of a file. `endpoint` is `/v1/embeddings`, `/v1/rerank`, `/predict` or `/classify`, and \
                  `completion_window` a number and a unit, such as `24h`.",
        example: BATCH_EXAMPLE,
        body: Some((
            "application/json",
            r#"{"type":"object","properties":{"input_file_id":{"type":"string"},"endpoint":{"type":"string"},"completion_window":{"type":"string"},"metadata":{"type":"object","additionalProperties":{"type":"string"}}},"required":["input_file_id","endpoint","completion_window"]}"#,
        )),
    },
    BatchCallDocs {
        method: "GET",
        path: BATCHES,
        summary: "The batches of this tenant, the newest first. Parameters: `limit` from 1 to 100, and `after`, the id of the last \
                  batch of the page before.",
        example: LIST_EXAMPLE,
        body: None,
    },
    BatchCallDocs {
        method: "GET",
        path: BATCH,
        summary: "A batch with its status and the number of its lines.",
        example: BATCH_EXAMPLE,
        body: None,
    },
    BatchCallDocs {
        method: "POST",
        path: BATCH_CANCEL,
        summary: "Cancels a batch. Lines that were computed stay in its output file.",
        example: BATCH_EXAMPLE,
        body: None,
    },
];

/// Headers of responses that no model computes.
const LOCAL_HEADERS: &[&str] = &[headers::REQUEST_ID, headers::REGION];
const JOB: &str = "/v1/async/{id}";
const JOB_CANCELLED: &str = "Cancels a job that is not finished.";
const JOB_WEBHOOK: &str = "/v1/async/{id}/webhook";
const JOB_RESENT: &str =
    "Sends the result of a finished job to its webhook again, or now if its next attempt is due later.";

fn job(status: &str) -> String {
    json!({"id": "job_01kaxk3v9y8r2m4n6p7q8s9t0v.gcp.europe-west4", "object": "job", "status": status})
        .to_string()
}

/// Describes the submission of a job, whose body is that of the ordinary path.
fn submitted(kind: JobKind) -> Value {
    let mut described = local(kind.path(), &submission(kind), &job("queued"));
    let accepted = described["responses"]["200"].take();
    described["responses"] = json!({"202": accepted, "default": described["responses"]["default"]});
    described["responses"]["202"]["description"] = json!("The job is stored.");
    let applied = format!("#/components/headers/{}", headers::PREFERENCE_APPLIED);
    described["responses"]["202"]["headers"][headers::PREFERENCE_APPLIED] = json!({"$ref": applied});
    described["parameters"] = request_parameters(JOB_HEADERS);
    let body = format!("#/paths/{}/post/requestBody", kind.computed_path().replace('/', "~1"));
    described["requestBody"] = json!({"$ref": body});
    described
}

fn submission(kind: JobKind) -> String {
    let path = kind.computed_path();
    format!(
        "Stores the request of `POST {path}` as a job, with the same body; its result is that of `POST {path}`. The body may \
         also have `webhook`, an object with the `url` that receives the result."
    )
}

fn request_parameters(further: &[Header]) -> Value {
    let parameter = |(name, _): &Header| json!({"$ref": format!("#/components/parameters/{name}")});
    REQUEST_HEADERS.iter().chain(further).map(parameter).collect()
}

fn computed(operation: &ApiOperation) -> Value {
    let ApiOperation { path, api, dialect, model, deployment_path, summary, body, list, example, .. } =
        *operation;
    let mut described = json!({
        "operationId": operation_id(path),
        "summary": summary,
        "tags": [api],
        "parameters": request_parameters(&[]),
        "responses": responses(dialect, example),
    });
    if deployment_path.is_some() {
        let name =
            json!({"name": "deployment", "in": "path", "required": true, "schema": {"type": "string"}});
        described["parameters"].as_array_mut().into_iter().for_each(|list| list.push(name.clone()));
    }
    if let Some(shape) = body {
        let schema = schema(&shape, list, model);
        described["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    described
}

fn local(path: &str, summary: &str, example: &str) -> Value {
    let mut described = json!({
        "operationId": operation_id(path),
        "summary": summary,
        "tags": ["Meridian"],
        "parameters": [],
        "responses": responses(Dialect::OpenAi, example),
    });
    // These responses have few of the headers of the others.
    if let Some(headers) = described["responses"]["200"]["headers"].as_object_mut() {
        headers.retain(|name, _| LOCAL_HEADERS.contains(&name.as_str()));
    }
    if path.contains("/{id}") {
        let id = json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string"}});
        described["parameters"] = json!([id]);
    }
    if path == paths::OPENAPI {
        described["security"] = json!([]);
    }
    described
}

fn operation_id(path: &str) -> String {
    let words = path.split(|byte: char| !byte.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let id = words.collect::<Vec<_>>().join("_");
    if id.is_empty() { "root".to_owned() } else { id }
}

fn responses(dialect: Dialect, example: &str) -> Value {
    let headers = response_headers();
    let example: Value = serde_json::from_str(example).unwrap_or_default();
    let kind = if example.is_array() { "array" } else { "object" };
    let content = json!({"application/json": {"schema": {"type": kind}, "example": example}});
    let error = format!("#/components/responses/{:?}Error", dialect);
    json!({
        "200": {"description": "The result.", "headers": headers, "content": content},
        "default": {"$ref": error},
    })
}

fn response_headers() -> Map<String, Value> {
    let reference = |name: &str| json!({"$ref": format!("#/components/headers/{name}")});
    // Only the acceptance of a job has it.
    let usual = RESPONSE_HEADERS.iter().filter(|(name, _)| *name != headers::PREFERENCE_APPLIED);
    usual.map(|(name, _)| ((*name).to_owned(), reference(name))).collect()
}

fn error_responses() -> Map<String, Value> {
    let response = |dialect: &Dialect| {
        let name = format!("{dialect:?}Error");
        let described = json!({
            "description": "An error; the header x-meridian-error has its code.",
            "headers": response_headers(),
            "content": {"application/json": {"schema": {"$ref": format!("#/components/schemas/{name}")}}},
        });
        (name, described)
    };
    Dialect::ALL.iter().map(response).collect()
}

/// Returns the schemas of the error bodies, derived from an example for each dialect.
fn errors() -> Map<String, Value> {
    let codes: Vec<&str> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
    let schema = |dialect: &Dialect| {
        let body = dialect.body(ErrorCode::MissingField, "`input` is missing", Some("input"));
        let example: Value = serde_json::from_slice(&body).unwrap_or_default();
        let members = example.as_object().cloned().unwrap_or_default();
        let properties: Map<_, _> = members
            .iter()
            .map(|(name, value)| {
                let kind = if value.is_object() { "object" } else { "string" };
                (name.clone(), json!({"type": kind}))
            })
            .collect();
        let required: Vec<&String> = members.keys().collect();
        let schema =
            json!({"type": "object", "required": required, "properties": properties, "examples": [example]});
        (format!("{dialect:?}Error"), schema)
    };
    let mut schemas: Map<_, _> = Dialect::ALL.iter().map(schema).collect();
    schemas.insert("ErrorCode".to_owned(), json!({"type": "string", "enum": codes}));
    schemas
}

fn parameter((name, description): &Header) -> (String, Value) {
    let described = json!({"name": name, "in": "header", "required": false, "description": description, "schema": {"type": "string"}});
    ((*name).to_owned(), described)
}

/// Returns the base URL that names the deployment, for APIs without a model field.
fn deployment_server() -> Value {
    json!({
        "url": "/deployments/{name}",
        "description": "Every path of a deployment, which the base URL names.",
        "variables": {"name": {"default": "minilm", "description": "The deployment."}},
    })
}

fn schema(shape: &BodySchema, list: Option<(&'static str, usize)>, model: ModelField) -> Value {
    let mut properties = Map::new();
    for Field { name, kind, description } in shape.fields {
        let mut described = field(*kind);
        described["description"] = description.trim().into();
        if let Some((_, most)) = list.filter(|(field, _)| field == name) {
            let limited = format!("{} At most {most} elements{}.", description.trim(), split_note(most));
            described["description"] = limited.into();
        }
        properties.insert((*name).to_owned(), described);
    }
    if model == ModelField::Optional && !properties.contains_key("model") {
        let description = "The deployment, where the path does not name one.";
        properties.insert("model".to_owned(), json!({"type": "string", "description": description}));
    }
    let mut required = shape.required.to_vec();
    if model == ModelField::Required && !required.contains(&"model") {
        required.push("model");
    }
    let mut not = Map::new();
    for rejected in shape.rejected {
        not.insert(
            rejected.name.to_owned(),
            json!({"accepted": rejected.neutral, "instead": rejected.instead}),
        );
    }
    json!({"type": "object", "properties": properties, "required": required, "x-rejected": not})
}

fn split_note(most: usize) -> &'static str {
    if most == limits::MAX_INPUTS {
        " at a replica; the gateway splits longer lists where it can"
    } else {
        ""
    }
}

fn field(kind: FieldKind) -> Value {
    let text = || json!({"type": "string"});
    let texts = || json!({"type": "array", "items": {"type": "string"}});
    let tokens = || json!({"type": "array", "items": {"type": "integer", "minimum": 0}});
    let token_lists = || json!({"type": "array", "items": tokens()});
    let object = || json!({"type": "object", "properties": {"text": text()}, "required": ["text"]});
    match kind {
        FieldKind::Text => text(),
        FieldKind::Flag => json!({"type": "boolean"}),
        FieldKind::Count => json!({"type": "integer", "minimum": 1}),
        FieldKind::Integer => json!({"type": "integer"}),
        FieldKind::OneOf(words) => json!({"type": "string", "enum": words}),
        FieldKind::ListOf(words) => json!({"type": "array", "items": {"type": "string", "enum": words}}),
        FieldKind::Texts => texts(),
        FieldKind::TextOrTexts => json!({"anyOf": [text(), texts()]}),
        FieldKind::Inputs => json!({"anyOf": [text(), texts(), tokens(), token_lists()]}),
        FieldKind::InputsOrObjects => {
            let documents = json!({"type": "array", "items": {"anyOf": [text(), object()]}});
            json!({"anyOf": [text(), object(), documents, tokens(), token_lists()]})
        }
        FieldKind::Documents => {
            json!({"type": "array", "items": {"anyOf": [text(), {"type": "object"}]}})
        }
        FieldKind::TextsOrPairs => {
            let list = json!({"type": "array", "items": texts()});
            json!({"anyOf": [text(), texts(), list]})
        }
        FieldKind::TokenIds => json!({"anyOf": [tokens(), token_lists()]}),
        FieldKind::Sentences => json!({
            "type": "object",
            "properties": {"source_sentence": text(), "sentences": texts()},
            "required": ["source_sentence", "sentences"],
        }),
        FieldKind::FlagOr(words) => {
            json!({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": words}]})
        }
        FieldKind::Object => json!({"type": "object"}),
        FieldKind::Objects => json!({"type": "array", "items": {"type": "object"}}),
        FieldKind::Anything => json!({}),
    }
}

/// Returns the limits with their defaults, and the configuration key of each.
fn limits() -> Vec<(&'static str, u64, &'static str)> {
    vec![
        (
            "inputs of one request",
            INPUTS_MAX as u64,
            "of the gateway; more are rejected, and fewer are split over replicas",
        ),
        ("inputs at a replica", limits::MAX_INPUTS as u64, "`limits.max_inputs` of replica.toml"),
        ("documents of a rerank at a replica", limits::MAX_DOCUMENTS as u64, "`limits.max_documents`"),
        ("texts or pairs of a classification at a replica", limits::MAX_PAIRS as u64, "`limits.max_pairs`"),
        ("sentences of a similarity at a replica", limits::MAX_SENTENCES as u64, "`limits.max_sentences`"),
        ("tokens of one request at a replica", limits::MAX_REQUEST_TOKENS, "`limits.max_request_tokens`"),
        (
            "bytes of one body",
            limits::MAX_BODY_BYTES as u64,
            "`limits.max_body_bytes`; the gateway's is the same",
        ),
        (
            "timeout of a request in milliseconds",
            TIMEOUT_MAX.as_millis() as u64,
            "of `x-meridian-timeout-ms`",
        ),
    ]
}

/// Renders `docs/api.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# API\n\n\
         This page is rendered from the code by `gateway/src/openapi.rs`; a test verifies that both agree. \
         `GET /openapi.json` is the same as an OpenAPI 3.1 document. [clients.md](clients.md) shows each stock client, \
         [errors.md](errors.md) lists the error codes.\n\n\
         `model` names a deployment. Every path is served below `/deployments/{name}` as well, where the path names it. \
         API keys are sent in `authorization: Bearer KEY`, `api-key` or `x-api-key`.\n\n\
         ## Defaults\n\n\
         **Fields.** Unknown fields are ignored. A field that would change the result is read or rejected by name, never \
         ignored: the tables list both.\n\n\
         **Length of vectors.** Vectors are scaled to length one unless the request says otherwise, as OpenAI and \
         text-embeddings-inference (TEI) do it, also where the model has no normalization of its own. `normalize = false` in \
         `[embeddings]` of a replica's configuration leaves them as the model's own modules do. `normalize` in a request \
         decides for itself.\n\n\
         **Inputs that are too long** are rejected (`input_too_long`) unless the request says otherwise, as TEI does it \
         without `--auto-truncate`. `auto_truncate = true` in `[embeddings]` of a replica's configuration cuts them instead. \
         Cohere's and Voyage's paths cut them by themselves, as their services do, unless the request says otherwise.\n\n\
         **Prompts.** `prompt_name` names a prompt of the model's configuration; `input_type` and `task` say what the text is \
         for and use the model's prompt for that, or its default prompt where it has none.\n\n\
         ## Headers of requests\n\n| header | description |\n|---|---|\n",
    );
    let row = |page: &mut String, name: &str, description: &str| {
        page.push_str(&format!("| `{name}` | {description} |\n"))
    };
    for (name, description) in REQUEST_HEADERS {
        row(&mut page, name, description);
    }
    page.push_str("\nFurther headers of requests that become jobs ([jobs.md](jobs.md)):\n\n| header | description |\n|---|---|\n");
    for (name, description) in JOB_HEADERS {
        row(&mut page, name, description);
    }
    page.push_str("\n## Headers of responses\n\n| header | meaning |\n|---|---|\n");
    for (name, description) in RESPONSE_HEADERS {
        row(&mut page, name, description);
    }
    page.push_str("\n## Limits\n\n| limit | default | where |\n|---|---|---|\n");
    for (name, value, key) in limits() {
        page.push_str(&format!("| {name} | {value} | {key} |\n"));
    }
    page.push_str("\n## Paths\n");
    for (path, summary, _) in AT_THE_EDGE {
        page.push_str(&format!("\n### `GET {path}`\n\n{summary}\n"));
    }
    page.push_str(&format!("\n### `DELETE {JOB}`\n\n{JOB_CANCELLED}\n"));
    page.push_str(&format!("\n### `POST {JOB_WEBHOOK}`\n\n{JOB_RESENT}\n"));
    for kind in JobKind::ALL {
        page.push_str(&format!("\n### `POST {}`\n\n{}\n", kind.path(), submission(kind)));
    }
    for BatchCallDocs { method, path, summary, .. } in BATCH_CALLS {
        page.push_str(&format!("\n### `{method} {path}`\n\n{summary}\n"));
    }
    for operation in OPERATIONS {
        let ApiOperation { method, api, summary, body, list, split, .. } = operation;
        let path = operation.public_path();
        page.push_str(&format!("\n### `{method} {path}`\n\n{summary} API: {api}.\n"));
        if let Some((field, most)) = list {
            let split = split.iter().any(|list| list.name() == *field);
            let more =
                if split { format!("; longer lists are split, up to {INPUTS_MAX}") } else { String::new() };
            page.push_str(&format!("`{field}` has at most {most} elements at a replica{more}.\n"));
        }
        let Some(shape) = body else { continue };
        page.push_str("\n| field | meaning |\n|---|---|\n");
        for Field { name, kind, description } in shape.fields {
            let needed = if shape.required.contains(name) { " (required)" } else { "" };
            page.push_str(&format!("| `{name}`{needed} | {}{} |\n", description.trim(), values(*kind)));
        }
        if !shape.rejected.is_empty() {
            page.push_str("\nRejected: ");
            let rejected = shape.rejected.iter().map(|rejected| match rejected.neutral {
                [] => format!("`{}` (send {})", rejected.name, rejected.instead),
                neutral => format!(
                    "`{}` other than `{}` (send {})",
                    rejected.name,
                    neutral.join("`, `"),
                    rejected.instead
                ),
            });
            page.push_str(&rejected.collect::<Vec<_>>().join("; "));
            page.push_str(".\n");
        }
    }
    page
}

/// Describes the allowed values of a field.
fn values(kind: FieldKind) -> String {
    match kind {
        FieldKind::OneOf(words) | FieldKind::ListOf(words) => format!(" One of `{}`.", words.join("`, `")),
        FieldKind::FlagOr(words) => format!(" `true`, `false`, or one of `{}`.", words.join("`, `")),
        _ => String::new(),
    }
}
