// Calls of API.md with the client that openapi-generator makes for Go: `calls URL`. Prints what the answers say as JSON,
// the same members as each program of this folder.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"

	client "example.org/client"
)

const seed = 1<<53 - 1

type list = []any

func checked[T any, R any](answer T, _ R, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return answer
}

func seeded(answer *client.GenerateAnswer) list {
	choice := answer.Choices[0]
	return list{choice.Text, choice.Seed, answer.Chargpt.Seeds}
}

func main() {
	configuration := client.NewConfiguration()
	configuration.Servers = client.ServerConfigurations{{URL: os.Args[1]}}
	api := client.NewAPIClient(configuration)
	ctx := context.Background()
	said := map[string]any{}

	request := client.NewGenerateRequest()
	text := "ab"
	request.SetPrompt(client.CompletionRequestPrompt{String: &text})
	request.SetMaxTokens(8)
	said["drawn"] = seeded(checked(api.TextAPI.Generate(ctx).GenerateRequest(*request).Execute()))
	largest := int64(seed)
	request.SetSeed(client.CompletionRequestSeed{Int64: &largest})
	said["seeded"] = seeded(checked(api.TextAPI.Generate(ctx).GenerateRequest(*request).Execute()))

	completion := client.NewCompletionRequest()
	prompts, seeds, stops := []string{"ab", "cd"}, []int64{seed, 7}, []string{"e", "f"}
	completion.SetPrompt(client.CompletionRequestPrompt{ArrayOfString: &prompts})
	completion.SetMaxTokens(8)
	completion.SetSeed(client.CompletionRequestSeed{ArrayOfInt64: &seeds})
	completion.SetLogprobs(1)
	completion.SetStop(client.CompletionRequestStop{ArrayOfString: &stops})
	bias := map[string]float64{"g": -2.5}
	completion.SetLogitBias(client.CompletionRequestLogitBias{MapmapOfStringfloat64: &bias})
	completions := list{}
	for _, it := range checked(api.TextAPI.CreateCompletion(ctx).CompletionRequest(*completion).Execute()).Choices {
		logprobs := it.GetLogprobs()
		completions = append(completions, list{it.Text, it.Seed, it.FinishReason, logprobs.TokenLogprobs})
	}
	said["completions"] = completions

	texts := client.NewScoreRequest()
	texts.SetTexts(client.ScoreRequestTexts{ArrayOfString: &[]string{"abc", "cb"}})
	scores := list{}
	for _, it := range checked(api.LikelihoodAPI.Score(ctx).ScoreRequest(*texts).Execute()).Data {
		scores = append(scores, list{it.Nats, it.Characters})
	}
	said["scores"] = scores
	before := client.NewNextRequest()
	before.SetPrompt(client.NextRequestPrompt{String: &text})
	next := checked(api.LikelihoodAPI.NextCharacter(ctx).NextRequest(*before).Execute()).Data[0].Distribution[0]
	said["next"] = list{next.Character, next.Id, next.Probability}

	tokens := checked(api.CharactersAPI.Tokenize(ctx).TokenizeRequest(*client.NewTokenizeRequest("abc")).Execute()).Tokens
	said["tokens"] = tokens
	ids := client.NewDetokenizeRequest(tokens)
	said["text"] = checked(api.CharactersAPI.Detokenize(ctx).DetokenizeRequest(*ids).Execute()).Prompt
	tokenizer := checked(api.CharactersAPI.GetTokenizerInfo(ctx).Execute())
	said["vocab_size"] = tokenizer.VocabSize
	said["pad_token"] = tokenizer.PadToken.Get()
	model := checked(api.InformationAPI.ListModels(ctx).Execute()).Data[0].Id
	said["model"] = checked(api.InformationAPI.GetModel(ctx, model).Execute()).Id
	info := checked(api.InformationAPI.GetInfo(ctx).Execute())
	said["info"] = list{info.Model.Vocabulary, info.Limits.MaxBodyBytes}
	said["status"] = checked(api.OperationAPI.Readyz(ctx).Execute()).Status

	request.SetMaxTokens(-1)
	_, response, err := api.TextAPI.Generate(ctx).GenerateRequest(*request).Execute()
	var failure *client.GenericOpenAPIError
	if !errors.As(err, &failure) {
		log.Fatalf("no error of the API: %v", err)
	}
	details := failure.Model().(client.Error).Error
	said["error"] = list{response.StatusCode, details.Param.Get(), details.Type}

	encoded, err := json.Marshal(said)
	fmt.Println(string(encoded))
}
