//! Lines with the same parameters, as one request to a replica.
//!
//! A request costs a replica and its region more than a short text, so the texts of embedding requests that differ only in their
//! input are sent as one list. The vectors of the response are copied as text, digit by digit. Its token count is the sum over
//! all lines: each line gets a share by the bytes of its input, and the shares add up to the sum.

use super::line::BatchLine;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Request for several lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedRequest {
    /// The lines: the position of each in the list that was packed, the number of its inputs, and their bytes.
    pub members: Vec<PackedLine>,
    /// Body of the request.
    pub body: String,
}

/// Line of a packed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedLine {
    /// Position in the list that was packed.
    pub at: usize,
    /// Number of its inputs.
    pub inputs: usize,
    /// Their bytes.
    pub bytes: usize,
}

/// Returns the texts of an input as JSON; none for token ids, which are sent as they are.
fn joinable(input: &RawValue) -> Option<Vec<&str>> {
    let text = input.get();
    if text.starts_with('"') {
        return Some(vec![text]);
    }
    let texts: Vec<&RawValue> = serde_json::from_str(text).ok()?;
    let texts: Vec<&str> = texts.into_iter().map(RawValue::get).collect();
    texts.iter().all(|text| text.starts_with('"')).then_some(texts)
}

/// Joins embedding requests that differ only in their input. The lines have the same deployment. A line that cannot be joined
/// is a request of its own, with its own body.
pub fn pack(lines: &[&BatchLine<'_>]) -> Vec<PackedRequest> {
    let mut open = BTreeMap::<String, (Vec<PackedLine>, String)>::new();
    let mut requests = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let whole = line.body.get();
        let fields = serde_json::from_str::<BTreeMap<String, &RawValue>>(whole);
        let texts = fields.as_ref().ok().and_then(|fields| joinable(fields.get("input")?));
        let (Ok(fields), Some(texts)) = (fields, texts) else {
            let members = vec![PackedLine { at, inputs: 1, bytes: whole.len() }];
            requests.push(PackedRequest { members, body: whole.to_owned() });
            continue;
        };
        let mut parameters = String::new();
        for (name, value) in fields.iter().filter(|(name, _)| *name != "input") {
            write!(parameters, "{}:{value},", serde_json::Value::String(name.clone()))
                .expect("a string grows");
        }
        let (members, inputs) = open.entry(parameters).or_default();
        let bytes = texts.iter().map(|text| text.len()).sum();
        members.push(PackedLine { at, inputs: texts.len(), bytes });
        for text in texts {
            if !inputs.is_empty() {
                inputs.push(',');
            }
            inputs.push_str(text);
        }
    }
    requests.extend(open.into_iter().map(|(parameters, (members, inputs))| match members.as_slice() {
        [alone] => {
            let body = lines[alone.at].body.get().to_owned();
            PackedRequest { members, body }
        }
        _ => PackedRequest { members, body: format!("{{{parameters}\"input\":[{inputs}]}}") },
    }));
    requests
}

#[derive(Deserialize)]
struct PackedResponse<'a> {
    #[serde(borrow)]
    data: Vec<PackedRow<'a>>,
    #[serde(borrow)]
    model: &'a RawValue,
    usage: PackedUsage,
}

#[derive(Deserialize)]
struct PackedRow<'a> {
    #[serde(borrow)]
    embedding: &'a RawValue,
    index: usize,
}

#[derive(Deserialize)]
struct PackedUsage {
    prompt_tokens: u64,
}

/// Divides the response to a packed request: the body for each of its lines, in the order of its members. None if the response
/// does not have a vector for each input.
pub fn split(request: &PackedRequest, response: &[u8]) -> Option<Vec<String>> {
    if let [_] = request.members.as_slice() {
        return Some(vec![String::from_utf8(response.to_vec()).ok()?]);
    }
    let PackedResponse { data, model, usage } = serde_json::from_slice(response).ok()?;
    let inputs: usize = request.members.iter().map(|member| member.inputs).sum();
    if data.len() != inputs || !data.iter().enumerate().all(|(at, row)| row.index == at) {
        return None;
    }
    let all = request.members.iter().map(|member| member.bytes as u128).sum::<u128>().max(1);
    let (mut rows, mut bytes, mut counted) = (data.into_iter(), 0u128, 0u64);
    let bodies = request.members.iter().map(|member| {
        let mut body = "{\"object\":\"list\",\"data\":[".to_owned();
        for (index, row) in rows.by_ref().take(member.inputs).enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let written = write!(
                body,
                "{comma}{{\"object\":\"embedding\",\"index\":{index},\"embedding\":{}}}",
                row.embedding
            );
            written.expect("a string grows");
        }
        bytes += member.bytes as u128;
        let until = (u128::from(usage.prompt_tokens) * bytes / all) as u64;
        let tokens = until - counted;
        counted = until;
        let written = write!(
            body,
            "],\"model\":{model},\"usage\":{{\"prompt_tokens\":{tokens},\"total_tokens\":{tokens}}}}}"
        );
        written.expect("a string grows");
        body
    });
    Some(bodies.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::line;
    use serde_json::{Value, json};

    fn text(body: &Value) -> String {
        json!({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}).to_string()
    }

    #[test]
    fn requests_that_differ_only_in_their_input_are_joined_and_divided_again() {
        let bodies = [
            json!({"model": "m", "input": "a\"b"}),
            json!({"input": ["c", "dd"], "model": "m"}),
            json!({"model": "m", "input": "e", "dimensions": 8}),
            json!({"model": "m", "input": [1, 2]}),
            json!({"model": "m", "input": "f"}),
        ];
        let texts = bodies.each_ref().map(text);
        let lines: Vec<_> = texts.iter().map(|text| line::read(text.as_bytes()).unwrap()).collect();
        let packed = pack(&lines.iter().collect::<Vec<_>>());
        let members: Vec<Vec<_>> =
            packed.iter().map(|request| request.members.iter().map(|member| member.at).collect()).collect();
        assert_eq!(members, [vec![3], vec![2], vec![0, 1, 4]]);
        assert_eq!(serde_json::from_str::<Value>(&packed[0].body).unwrap(), bodies[3]);
        assert_eq!(serde_json::from_str::<Value>(&packed[1].body).unwrap(), bodies[2]);
        let joined: Value = serde_json::from_str(&packed[2].body).unwrap();
        assert_eq!(joined, json!({"model": "m", "input": ["a\"b", "c", "dd", "f"]}));

        let rows: Vec<_> = (0..4)
            .map(|at| format!("{{\"object\":\"embedding\",\"embedding\":[0.{at}0],\"index\":{at}}}"))
            .collect();
        let response = format!(
            "{{\"object\":\"list\",\"data\":[{}],\"model\":\"m\",\"usage\":{{\"prompt_tokens\":10,\"total_tokens\":10}}}}",
            rows.join(",")
        );
        let split_bodies = split(&packed[2], response.as_bytes()).unwrap();
        assert!(split_bodies[1].contains("\"embedding\":[0.20]"), "digits are kept: {}", split_bodies[1]);
        let parsed: Vec<Value> =
            split_bodies.iter().map(|body| serde_json::from_str(body).unwrap()).collect();
        assert_eq!(parsed[1]["data"][1]["index"], 1);
        assert_eq!(parsed[2]["data"][0]["embedding"], json!([0.3]));
        let tokens: u64 = parsed.iter().map(|body| body["usage"]["total_tokens"].as_u64().unwrap()).sum();
        assert_eq!(tokens, 10);
        assert_eq!(split(&packed[2], b"{}"), None);
        assert_eq!(split(&packed[0], b"{}"), Some(vec!["{}".to_owned()]));
    }
}
